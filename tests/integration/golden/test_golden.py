"""Golden parity through the gRPC API: each model's base and every adapter meant to load, in float32."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest
import pytest_asyncio

from lorikeet.adapters.v1 import adapter_pb2
from lorikeet.residency.v1 import residency_pb2, residency_service_pb2_grpc
from tests.support.golden import FIXTURES, GOLDEN_MODELS, GoldenModel, compare, golden_answers
from tests.support.golden_table import GoldenTable
from tests.support.stack import NODE_TOKEN, Completion, Stack

in_module_loop = pytest.mark.asyncio(loop_scope="module")
# What an adapter that is not served must be refused for, by the name of the field in its configuration.
REFUSED_FOR = {
    "dora-r4": "use_dora",
    "bias-all-r4": "bias",
    "lora-bias-r4": "lora_bias",
    "modules-to-save-r4": "modules_to_save",
}
WITH_REFUSED = ("qwen3_moe", "gpt_oss", "llama")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(model, id=model.name, marks=() if model.is_always else pytest.mark.long)
        for model in GOLDEN_MODELS
    ],
)
def model(request: pytest.FixtureRequest) -> GoldenModel:
    """Each model in turn."""
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(model: GoldenModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One stack with every adapter of the model uploaded."""
    flags = ["--max-top-logprobs", str(model.vocab_size), "--max-active-adapters", "8"]
    root = tmp_path_factory.mktemp("golden")
    async with Stack(FIXTURES / "models" / model.name, root, node_flags=flags) as running:
        for adapter in model.adapters():
            await running.upload(FIXTURES / adapter["dir"], f"demo/{adapter['name']}")
        for adapter in model.adapters():
            await running.wait_known(f"demo/{adapter['name']}")
        yield running


def goldens(model: GoldenModel) -> list[tuple[str | None, str]]:
    """The base and every adapter meant to load, each with the path of its golden."""
    return [(None, model.base), *((f"demo/{a['name']}", a["golden"]) for a in model.adapters())]


async def check_all_at_once(stack: Stack, model: GoldenModel, table: GoldenTable) -> None:
    """Base and adapters in mixed batches, every answer against its golden."""
    names = goldens(model)
    replies = await asyncio.gather(*(golden_answers(stack, model, name) for name, _ in names))
    failures: list[str] = []
    for (name, golden), reply in zip(names, replies, strict=True):
        verdicts = compare(golden, reply)
        table.add(model.name, shown(name), verdicts)
        failures += [f"{name}: {text}" for ok, text in verdicts if ok is False]
    assert not failures, "\n".join(failures)


def shown(name: str | None) -> str | None:
    """An adapter's name as the manifest has it."""
    return name and name.removeprefix("demo/")


def test_the_manifest_has_adapters_of_every_layout() -> None:
    """The lists are not empty by accident, and every adapter named is in the tree."""
    assert {m.name: len(m.adapters()) for m in GOLDEN_MODELS} == {
        "qwen3_moe": 17,
        "gpt_oss": 12,
        "gpt_oss_mxfp4": 12,
        "mixtral": 10,
        "llama": 10,
        "qwen3": 7,
        "olmoe": 9,
        "qwen2_moe": 8,
        "granitemoe": 7,
        "llama4": 8,
        "deepseek_v3": 9,
        "deepseek_v2": 8,
    }
    assert all(
        (FIXTURES / a["dir"] / "adapter_config.json").is_file() for m in GOLDEN_MODELS for a in m.adapters()
    )


@in_module_loop
async def test_each_alone(stack: Stack, model: GoldenModel, table: GoldenTable) -> None:
    """The base and each adapter, one after the other, equal transformers + peft."""
    failures: list[str] = []
    for name, golden in goldens(model):
        verdicts = compare(golden, await golden_answers(stack, model, name))
        assert len(verdicts) >= 9
        table.add(model.name, shown(name), verdicts)
        failures += [f"{name}: {text}" for ok, text in verdicts if ok is False]
    assert not failures, "\n".join(failures)


def first_logprobs(answer: Completion) -> np.ndarray:
    """The whole vocabulary's log-probabilities of the first output token, by token id."""
    by_id = sorted((top.id, top.logprob) for top in answer.tokens[0].top_logprobs)
    return np.array([logprob for _, logprob in by_id])


@in_module_loop
async def test_four_adapters_in_one_batch_equal_each_alone(stack: Stack, model: GoldenModel) -> None:
    """Greedy tokens are the same, log-probabilities equal to what float32 leaves of another batch's shape."""
    names = [f"demo/{name}" for name in model.mixed]
    assert len(names) == 4
    alone = [await golden_answers(stack, model, name) for name in names]
    together = await asyncio.gather(*(golden_answers(stack, model, name) for name in names))
    for name, one, mixed in zip(names, alone, together, strict=True):
        for prompt, answer in one.items():
            assert answer.token_ids == mixed[prompt].token_ids, (name, prompt)
            np.testing.assert_allclose(
                first_logprobs(mixed[prompt]), first_logprobs(answer), atol=2e-4, err_msg=f"{name} {prompt}"
            )


@in_module_loop
async def test_mixed_then_evicted_then_again(stack: Stack, model: GoldenModel, table: GoldenTable) -> None:
    """All adapters and the base in mixed batches; and again after every adapter was unloaded."""
    await check_all_at_once(stack, model, table)
    admin = stack.adapters()
    for adapter in model.adapters():
        await admin.UnloadAdapter(
            adapter_pb2.UnloadAdapterRequest(name=f"demo/{adapter['name']}"),
            metadata=stack.auth(),
            timeout=20,
        )
    status = await stack.status()
    assert (status.active_adapters, status.host_adapters, status.adapter_leases) == (0, 0, 0)
    await check_all_at_once(stack, model, table)


@in_module_loop
async def test_reloaded_from_the_store_after_the_disk_cache_is_dropped(
    stack: Stack, model: GoldenModel, table: GoldenTable
) -> None:
    """The node's own residency RPC drops host, device and disk; the next request fetches from the store."""
    node = residency_service_pb2_grpc.ResidencyServiceStub(stack._channel(stack.node_address))
    metadata = stack.auth(NODE_TOKEN)
    listed = await node.ListResident(residency_pb2.ListResidentRequest(), metadata=metadata, timeout=10)
    for resident in listed.adapters:
        await node.UnloadAdapter(
            residency_pb2.UnloadAdapterRequest(digest=resident.digest, keep_on_disk=False),
            metadata=metadata,
            timeout=20,
        )
    await check_all_at_once(stack, model, table)


@in_module_loop
async def test_what_is_not_served_is_refused_by_name(
    stack: Stack, model: GoldenModel, table: GoldenTable
) -> None:
    """Features that a server may leave out: the upload fails, names the field and leaves nothing behind."""
    adapters = model.adapters("load_or_reject")
    assert adapters or model.golden not in WITH_REFUSED
    for adapter in adapters:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.upload(FIXTURES / adapter["dir"], f"demo/{adapter['name']}")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert REFUSED_FOR[adapter["name"]] in str(caught.value.details())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generate([1], adapter=f"demo/{adapter['name']}", max_tokens=1)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        table.add_refused(model.name, adapter["name"], REFUSED_FOR[adapter["name"]])
    assert not [t for ok, t in compare(model.base, await golden_answers(stack, model, None)) if ok is False]
