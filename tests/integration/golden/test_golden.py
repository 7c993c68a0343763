"""Golden parity through the gRPC API: each model's base and every adapter meant to load, in float32."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest
import pytest_asyncio

from lorikeet.adapters.v1 import adapter_pb2
from lorikeet.residency.v1 import residency_pb2, residency_service_pb2_grpc
from tests.support.golden import (
    DECODED_PROMPT,
    FIXTURES,
    GOLDEN_MODELS,
    GREEDY_TOKENS,
    GoldenModel,
    compare,
    decoding,
    golden_answers,
)
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


def logprobs(answer: Completion) -> np.ndarray:
    """The whole vocabulary's log-probabilities of every prompt token asked for and every output token."""
    rows = [*answer.prompt_tokens[1:], *answer.tokens]
    return np.array([[p for _, p in sorted((t.id, t.logprob) for t in row.top_logprobs)] for row in rows])


@in_module_loop
async def test_four_adapters_and_the_base_in_one_batch_equal_each_alone(
    stack: Stack, model: GoldenModel, table: GoldenTable
) -> None:
    """Prompts of 1 to 130 tokens prefill while the same five decode: each equals itself alone and its golden.

    Greedy tokens are the same at every step; log-probabilities of all positions differ by what float32 leaves
    of another batch's shape.
    """
    cases = {None: model.base} | {
        f"demo/{a['name']}": a["golden"] for a in model.adapters() if a["name"] in model.mixed
    }
    assert len(cases) == 5
    alone = {name: await golden_answers(stack, model, name) for name in cases}
    async with decoding(stack, list(cases)) as streams:
        answers = await asyncio.gather(*(golden_answers(stack, model, name) for name in cases))
        await asyncio.gather(*(stream.has_tokens(GREEDY_TOKENS) for stream in streams))
        assert all(stream.is_open for stream in streams), "all five decoded as long as there was prefill"
    together = dict(zip(cases, answers, strict=True))
    failures: list[str] = []
    for (name, golden), stream in zip(cases.items(), streams, strict=True):
        verdicts = compare(golden, together[name])
        table.add(model.name, shown(name), verdicts)
        failures += [f"{name}: {text}" for ok, text in verdicts if ok is False]
        assert stream.token_ids[:GREEDY_TOKENS] == alone[name][DECODED_PROMPT].token_ids, name
        for prompt, answer in alone[name].items():
            mixed = together[name][prompt]
            assert answer.token_ids == mixed.token_ids, (name, prompt)
            np.testing.assert_allclose(
                logprobs(mixed), logprobs(answer), atol=2e-4, err_msg=f"{name} {prompt}"
            )
    assert not failures, "\n".join(failures)
    assert await stack.at_rest() == ""


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
