"""Probes on a real node, over rigs whose logits are known: by themselves, when asked, and beside requests."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet_bench import rigs
from lorikeet_rpc.errors import from_rpc_error
from tests.support.metered_stack import MeteredStack
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")
# Control characters, which the probe's text does not have.
WATERMARK, OTHER_WATERMARK = 1, 2
PROBES = "lorikeet_adapter_probes_total"


def write_v_proj(path: Path, a: float, b: float) -> Path:
    """An adapter on v_proj alone, every element of A and of B the same."""
    shape = rigs.RigShape()
    tensors: dict[str, np.ndarray] = {}
    for layer in range(shape.layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        tensors[f"{name}.lora_A.weight"] = np.full((1, shape.vocab), a)
        tensors[f"{name}.lora_B.weight"] = np.full((shape.vocab, 1), b)
    return rigs.write_adapter(path, tensors, r=1, alpha=1, target_modules=["v_proj"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeteredStack]:
    """The copy base, its manager probing by itself as it does unless it is told not to."""
    root = tmp_path_factory.mktemp("probes")
    base = rigs.write_copy_base(root / "base")
    async with MeteredStack(base, root / "stack", manager_flags=["--probe-on-load"]) as running:
        adapters = {
            "mark": rigs.write_moe_watermark(root / "mark", WATERMARK),
            "other": rigs.write_moe_watermark(root / "other", OTHER_WATERMARK),
            "nothing": write_v_proj(root / "nothing", 1.0, 0.0),
            "overflow": write_v_proj(root / "overflow", 1e30, 1e30),
        }
        for name, directory in adapters.items():
            await running.upload(directory, f"demo/{name}")
        yield running


async def probe(stack: Stack, name: str) -> pb.Probe:
    """Ask for a probe."""
    request = pb.ProbeAdapterRequest(name=name)
    return (await stack.adapters().ProbeAdapter(request, metadata=stack.auth(), timeout=60)).revision.probe


async def recorded(stack: Stack, name: str) -> pb.Probe | None:
    """What the registry has of an adapter's one revision."""
    request = pb.GetAdapterRequest(name=name)
    reply = await stack.adapters().GetAdapter(request, metadata=stack.auth(), timeout=10)
    (revision,) = reply.adapter.revisions
    return revision.probe if revision.HasField("probe") else None


async def test_a_watermark_changes_what_its_construction_says(stack: Stack) -> None:
    """Rows of the rig are orthonormal and its norm scales them to 8: the mark gets the 8 that a copy had."""
    found = await probe(stack, "demo/mark")
    assert found.verdict == pb.PROBE_VERDICT_CHANGES
    assert found.max_difference == pytest.approx(8, abs=0.2)
    assert found.noise == 0  # a CPU's rows do not depend on their batch
    assert found.positions > 30
    assert found.top1_changes == found.positions
    assert found.node == stack.node_address


async def test_zero_and_overflowing_weights_are_told(stack: Stack) -> None:
    """B of zero changes no bit; products beyond float32 are not finite, and end no engine."""
    nothing = await probe(stack, "demo/nothing")
    assert nothing.verdict == pb.PROBE_VERDICT_CHANGES_NOTHING
    assert (nothing.max_difference, nothing.noise, nothing.top1_changes) == (0, 0, 0)
    assert (await probe(stack, "demo/overflow")).verdict == pb.PROBE_VERDICT_NOT_FINITE
    assert (await recorded(stack, "demo/overflow")).verdict == pb.PROBE_VERDICT_NOT_FINITE  # type: ignore[union-attr]
    assert (await stack.generate([5], max_tokens=3)).token_ids == [5, 5, 5]
    assert await stack.at_rest() == ""


async def test_the_first_request_brings_the_proof(stack: Stack) -> None:
    """Nobody asks; the request itself is right, whatever runs beside it."""
    assert await recorded(stack, "demo/other") is None
    await stack.wait_known("demo/other")
    done = await stack.generate([5], adapter="demo/other", max_tokens=20)
    assert done.token_ids == [OTHER_WATERMARK] * 20

    end_s = time.monotonic() + 60
    while (found := await recorded(stack, "demo/other")) is None and time.monotonic() < end_s:  # noqa: ASYNC110
        await asyncio.sleep(0.05)  # the state is another process's
    assert found is not None
    assert found.verdict == pb.PROBE_VERDICT_CHANGES
    assert found.top1_changes == found.positions
    assert await stack.at_rest() == ""


async def test_requests_beside_probes_are_exact(stack: Stack) -> None:
    """Streams of base and adapters keep every token while probes come and go; nothing is left behind."""

    async def stream(adapter: str | None, token: int) -> None:
        done = await stack.generate([5], adapter=adapter, max_tokens=60)
        assert done.token_ids == [token] * 60

    streams = [stream(None, 5), stream("demo/mark", WATERMARK), stream("demo/other", OTHER_WATERMARK)]
    probes = [probe(stack, f"demo/{name}") for name in ("mark", "nothing", "overflow", "mark")]
    results: list[Any] = await asyncio.gather(*streams, *streams_of(stack), *probes)
    verdicts = [p.verdict for p in results[-4:]]
    assert verdicts == [
        pb.PROBE_VERDICT_CHANGES,
        pb.PROBE_VERDICT_CHANGES_NOTHING,
        pb.PROBE_VERDICT_NOT_FINITE,
        pb.PROBE_VERDICT_CHANGES,
    ]
    assert await stack.at_rest() == ""


def streams_of(stack: Stack) -> list[Any]:
    """More of the base than the batch needs."""
    return [stack.generate([7], max_tokens=40) for _ in range(3)]


async def test_probes_are_nobodys_requests(stack: MeteredStack) -> None:
    """No series of requests, tokens or latencies counts them; the manager counts what came of them."""
    names = (
        "lorikeet_requests_finished_total",
        "lorikeet_prompt_tokens_total",
        "lorikeet_output_tokens_total",
        "lorikeet_time_to_first_token_seconds_count",
    )

    async def counted() -> dict[str, list[str]]:
        lines = (await stack.node_scrape()).text.splitlines()
        return {name: sorted(line for line in lines if line.startswith(name)) for name in names}

    before, probes = await counted(), (await stack.manager_scrape()).by(PROBES, "verdict")
    assert all(before.values())
    for name in ("mark", "nothing", "overflow"):
        await probe(stack, f"demo/{name}")
    assert await counted() == before
    after = (await stack.manager_scrape()).by(PROBES, "verdict")
    # Or more, where the manager's own probe of one came in between.
    assert {verdict for verdict in after if after[verdict] > probes[verdict]} == {
        "changes",
        "changes_nothing",
        "not_finite",
    }


async def test_an_unknown_adapter_and_a_stranger_get_no_probe(stack: Stack) -> None:
    """NOT_FOUND for both; the node knows nothing of it."""
    token = await stack.set_tenant("stranger")
    for name, who in (("demo/none", None), ("demo/mark", token)):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stack.adapters().ProbeAdapter(
                pb.ProbeAdapterRequest(name=name), metadata=stack.auth(who), timeout=20
            )
        assert from_rpc_error(error.value).reason == "ADAPTER_NOT_FOUND"
