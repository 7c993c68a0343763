"""32 streams over 8 adapters with random cancels: no token lost, none crossed, counters back at rest."""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from lorikeet.inference.v1 import model_pb2
from lorikeet_bench import rigs
from tests.support.stack import Stack, make_request

pytestmark = pytest.mark.asyncio(loop_scope="module")
STREAMS = 32
MARKS = [10 + 5 * n for n in range(8)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Eight watermarks over four slots, so that slots change hands; few blocks, so some are preempted."""
    root = tmp_path_factory.mktemp("streams")
    base = rigs.write_copy_base(root / "base")
    flags = [
        "--max-active-adapters",
        "4",
        "--max-running-requests",
        "16",
        "--max-step-tokens",
        "128",
        "--num-blocks",
        "160",
    ]
    async with Stack(base, root / "stack", node_flags=flags) as running:
        for mark in MARKS:
            await running.upload(rigs.write_moe_watermark(root / f"w{mark}", mark), f"demo/w{mark}")
        for mark in MARKS:
            await running.wait_known(f"demo/w{mark}")
        yield running


def levels(status: model_pb2.EngineStatus) -> tuple[int, ...]:
    """The counters that must return to their start values."""
    available = status.kv_blocks_total - status.kv_blocks_available
    return status.running_requests, status.waiting_requests, available, status.adapter_leases


async def one_stream(stack: Stack, rng: random.Random, until: float, wrong: list[str]) -> tuple[int, int]:
    """Requests one after the other; returns how many ended by themselves and how many were cancelled."""
    stub = stack.inference()
    done = cancelled = 0
    while time.monotonic() < until:
        mark = rng.choice([None, *MARKS])
        last = rng.randrange(64)
        prompt = [rng.randrange(64) for _ in range(rng.choice([0, 3, 40, 300]))] + [last]
        count = rng.choice([1, 5, 60])
        want = last if mark is None else mark
        call = stub.Generate(
            make_request(prompt, adapter=mark and f"demo/w{mark}", max_tokens=count),
            metadata=stack.auth(),
            timeout=60,
        )
        stop_after = rng.randrange(count + 1) if rng.random() < 0.3 else None
        seen: list[int] = []
        finished = False
        try:
            async for piece in call:
                seen += [t.id for t in piece.tokens]
                finished = finished or piece.HasField("finish")
                if stop_after is not None and len(seen) >= stop_after and not finished:
                    call.cancel()
                    break
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
        if any(t != want for t in seen):
            wrong.append(f"adapter {mark}: expected {want}, got {seen}")
        if finished and seen != [want] * count:
            wrong.append(f"adapter {mark}: expected {count} times {want}, got {seen}")
        done, cancelled = done + finished, cancelled + (not finished)
    return done, cancelled


async def run(stack: Stack, seconds: float) -> None:
    """The whole scenario."""
    seed = int(os.environ.get("LORIKEET_TEST_SEED", "1"))
    before = await stack.status()
    wrong: list[str] = []
    until = time.monotonic() + seconds
    totals = await asyncio.gather(
        *(one_stream(stack, random.Random(seed * 1000 + n), until, wrong) for n in range(STREAMS))
    )
    assert not wrong, "\n".join(wrong[:10])
    done, cancelled = (sum(t[i] for t in totals) for i in (0, 1))
    print(f"\n{done} requests ended, {cancelled} were cancelled in {seconds:.0f} s")
    assert done > STREAMS
    assert cancelled > 0
    end = time.monotonic() + 5
    while levels(after := await stack.status()) != levels(before):
        assert time.monotonic() < end, f"counters did not return: {before} -> {after}"
        await asyncio.sleep(0.05)
    assert after.adapter_evictions > before.adapter_evictions, (
        "slots never changed hands: the test is too easy"
    )


async def test_for_five_seconds(stack: Stack) -> None:
    """The short form, part of every run."""
    await run(stack, 5)


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_for_a_minute(stack: Stack) -> None:
    """The long form."""
    await run(stack, 60)
