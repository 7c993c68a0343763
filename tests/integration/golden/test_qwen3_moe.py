"""Golden parity through the gRPC API: the base and every adapter meant to load, in float32."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from lorikeet.adapters.v1 import adapter_pb2
from lorikeet.residency.v1 import residency_pb2, residency_service_pb2_grpc
from tests.support.golden import FIXTURES, compare, manifest_adapters, prompts
from tests.support.stack import NODE_TOKEN, Completion, Stack

MODEL = "qwen3_moe"
VOCAB = 528
ADAPTERS = manifest_adapters(MODEL, "load")
in_module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One stack with every adapter uploaded."""
    flags = ["--max-top-logprobs", str(VOCAB), "--max-active-adapters", "8"]
    root = tmp_path_factory.mktemp("golden")
    async with Stack(FIXTURES / "models" / MODEL, root, node_flags=flags) as running:
        for adapter in ADAPTERS:
            await running.upload(FIXTURES / adapter["dir"], f"demo/{adapter['name']}")
        for adapter in ADAPTERS:
            await running.wait_known(f"demo/{adapter['name']}")
        yield running


async def answers(stack: Stack, adapter: str | None) -> dict[str, Completion]:
    """Greedy answers to all prompts at once, with the whole vocabulary's log-probabilities."""
    names = prompts()
    done = await asyncio.gather(
        *(
            stack.generate(
                ids,
                adapter=adapter,
                max_tokens=16,
                ignore_eos=True,
                logprobs=VOCAB,
                **({"prompt_logprobs": VOCAB} if name == "p33" else {}),
            )
            for name, ids in names.items()
        )
    )
    return dict(zip(names, done, strict=True))


async def check_all_at_once(stack: Stack) -> None:
    """Base and adapters in mixed batches, every answer against its golden."""
    names: list[tuple[str | None, str]] = [(None, f"golden/{MODEL}/base")]
    names += [(f"demo/{a['name']}", a["golden"]) for a in ADAPTERS]
    replies = await asyncio.gather(*(answers(stack, name) for name, _ in names))
    failures = [
        f"{name}: {text}"
        for (name, golden), reply in zip(names, replies, strict=True)
        for ok, text in compare(golden, reply)
        if ok is False
    ]
    assert not failures, "\n".join(failures)


def test_the_manifest_has_adapters_of_every_layout() -> None:
    """The list is not empty by accident."""
    assert len(ADAPTERS) >= 15


@in_module_loop
@pytest.mark.parametrize("name", [None, *(a["name"] for a in ADAPTERS)])
async def test_alone(stack: Stack, name: str | None) -> None:
    """Each adapter served alone equals transformers + peft."""
    golden = next((a["golden"] for a in ADAPTERS if a["name"] == name), f"golden/{MODEL}/base")
    verdicts = compare(golden, await answers(stack, name and f"demo/{name}"))
    assert len(verdicts) >= 9
    assert not [text for ok, text in verdicts if ok is False]


@in_module_loop
async def test_mixed_then_evicted_then_again(stack: Stack) -> None:
    """All adapters and the base in mixed batches; and again after every adapter was unloaded."""
    await check_all_at_once(stack)
    admin = stack.adapters()
    for adapter in ADAPTERS:
        await admin.UnloadAdapter(
            adapter_pb2.UnloadAdapterRequest(name=f"demo/{adapter['name']}"),
            metadata=stack.auth(),
            timeout=20,
        )
    status = await stack.status()
    assert (status.active_adapters, status.host_adapters, status.adapter_leases) == (0, 0, 0)
    await check_all_at_once(stack)


@in_module_loop
async def test_reloaded_from_the_store_after_the_disk_cache_is_dropped(stack: Stack) -> None:
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
    await check_all_at_once(stack)


def test_fixture_paths_exist() -> None:
    """Every adapter named by the manifest is in the tree."""
    assert all((FIXTURES / a["dir"] / "adapter_config.json").is_file() for a in ADAPTERS)
    assert Path(FIXTURES / "models" / MODEL / "config.json").is_file()
