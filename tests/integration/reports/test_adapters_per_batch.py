"""A batch never holds more adapters than allowed, whatever waits, is half prefilled, preempted or cancelled.

The scheduler must count the adapters of half-prefilled and of preempted requests, too; one too many killed
the runner for good. Seen in the engine's own log of every step. Sources: sgl-project/sglang#23141, #25078.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lorikeet.inference.v1 import generation_pb2, model_pb2
from lorikeet_bench import rigs
from tests.support.stack import Stack, make_request
from tests.support.waiting import eventually

MARKS = (10, 20, 30)
LONG_PROMPT, BASE_PROMPTS = 2000, (300, 700, 1100, 1500)
CANCELLED_SHARE = 0.3
OUTPUTS = (1, 30, 250, 250)
# Three long prompts fit, with little room to grow: what runs is preempted now and then.
NUM_BLOCKS = 390
CHUNK = 512
MOST_S = 150.0  # a loaded machine takes longer until everything has come about


@dataclass(slots=True)
class Tally:
    """What the streams saw."""

    ended: Counter[int | None] = field(default_factory=Counter[int | None])
    cancelled: int = 0
    wrong: list[str] = field(default_factory=list[str])


async def one_request(stack: Stack, stub: Any, rng: random.Random, mark: int | None, tally: Tally) -> None:
    """A long prompt; cancelled at some moment before its end, or checked token by token."""
    count, last = rng.choice(OUTPUTS), rng.randrange(64)
    length = LONG_PROMPT if mark else rng.choice(BASE_PROMPTS)
    prompt = [rng.randrange(64) for _ in range(length - 1)] + [last]
    want = last if mark is None else mark
    request = make_request(prompt, adapter=mark and f"demo/w{mark}", max_tokens=count)
    call = stub.Generate(request, metadata=stack.auth(), timeout=120)
    is_cancelled = rng.random() < CANCELLED_SHARE
    if is_cancelled and rng.random() < 0.5:  # while it waits or is being prefilled
        await asyncio.sleep(rng.random())
        call.cancel()
        tally.cancelled += 1
        return
    stop_after = rng.randrange(count) if is_cancelled else None
    seen: list[int] = []
    finish: generation_pb2.Finish | None = None
    async for piece in call:
        seen += [token.id for token in piece.tokens]
        finish = piece.finish if piece.HasField("finish") else finish
        if stop_after is not None and len(seen) > stop_after and finish is None:
            call.cancel()
            tally.cancelled += 1
            break
    if any(token != want for token in seen) or (finish is not None and seen != [want] * count):
        tally.wrong.append(f"adapter {mark}: wanted {count} times {want}, got {seen}")
    if finish is not None:
        tally.ended[mark] += 1


async def stream(stack: Stack, seed: int, mark: int | None, is_over: asyncio.Event, tally: Tally) -> None:
    """Requests of one kind, one after the other."""
    rng, stub = random.Random(seed), stack.inference()
    while not is_over.is_set():
        await one_request(stack, stub, rng, mark, tally)


async def watch(
    stack: Stack, before: model_pb2.EngineStatus, seconds: float, is_over: asyncio.Event, tally: Tally
) -> None:
    """Let the streams go on for so long, and until each hard thing has happened at least once."""
    begun_s = time.monotonic()
    while (elapsed_s := time.monotonic() - begun_s) < MOST_S + seconds:
        await asyncio.sleep(0.5)
        status = await stack.status()
        is_hard = (
            set(tally.ended) == {None, *MARKS}
            and tally.cancelled
            and status.preemptions > before.preemptions
            and status.adapter_evictions > before.adapter_evictions
        )
        if tally.wrong or (is_hard and elapsed_s >= seconds):
            break
    is_over.set()


def logged_steps(stack: Stack) -> Iterator[dict[str, Any]]:
    """The engine's line of each step, read by nothing of the engine's."""
    for line in stack.node.log.read_text().splitlines():
        if '"engine.step_scheduled"' in line:
            yield json.loads(line)


def levels(status: model_pb2.EngineStatus) -> tuple[int, ...]:
    """Counters that return to zero."""
    in_use = status.kv_blocks_total - status.kv_blocks_available
    return status.running_requests, status.waiting_requests, in_use, status.adapter_leases


async def run(root: Path, max_adapters: int, seconds: float, kinds: Sequence[int | None]) -> None:
    """Base streams fill the batch, streams of each of three adapters press in at once."""
    base = rigs.write_copy_base(root / "base")
    flags = [
        *("--max-active-adapters", str(max_adapters), "--max-step-tokens", str(CHUNK)),
        *("--num-blocks", str(NUM_BLOCKS), "--max-running-requests", "8", "--slot-patience-s", "0.1"),
        *("--log-level", "debug", "--log-format", "json"),
    ]
    async with Stack(base, root / "stack", node_flags=flags) as stack:
        digests: set[str] = set()
        for mark in MARKS:
            directory = rigs.write_moe_watermark(root / f"w{mark}", mark)
            digests.add((await stack.upload(directory, f"demo/w{mark}")).revision.digest)
            await stack.wait_known(f"demo/w{mark}")
        before = await stack.model()
        seed = int(os.environ.get("LORIKEET_TEST_SEED", "1")) * 1000
        tally = Tally()
        begun_s = time.monotonic()
        is_over = asyncio.Event()
        await asyncio.gather(
            watch(stack, before.status, seconds, is_over, tally),
            *(stream(stack, seed + n, mark, is_over, tally) for n, mark in enumerate(kinds)),
        )
        assert not tally.wrong, "\n".join(tally.wrong[:10])
        after = await stack.model()
        assert after.instance_id == before.instance_id, "the engine died"
        for _ in range(200):
            if levels(after.status) == (0, 0, 0, 0):
                break
            await asyncio.sleep(0.05)
            after = await stack.model()
        assert levels(after.status) == (0, 0, 0, 0)
        await check_steps(stack, digests, max_adapters, after.status.steps)
    preempted = after.status.preemptions - before.status.preemptions
    print(
        f"\n{tally.ended.total()} ended {dict(tally.ended)}, {tally.cancelled} cancelled, "
        f"{preempted} preempted in {time.monotonic() - begun_s:.0f} s"
    )
    assert set(tally.ended) == {None, *MARKS}
    assert tally.cancelled
    # Else the test was too easy.
    assert preempted > 0
    assert after.status.adapter_evictions > before.status.adapter_evictions


async def check_steps(stack: Stack, digests: set[str], max_adapters: int, num_steps: int) -> None:
    """Every step is in the log, none with too many adapters, and those that are hard came about."""
    await eventually(lambda: len(list(logged_steps(stack))) >= num_steps)
    steps = list(logged_steps(stack))
    assert [step["step"] for step in steps] == list(range(num_steps))
    too_many = [step for step in steps if len(step["adapters"]) > max_adapters]
    assert not too_many, too_many[:3]
    assert {digest for step in steps for digest in step["adapters"]} == digests
    full = [step for step in steps if len(step["adapters"]) == max_adapters]
    print(f"\n{len(steps)} steps, {len(full)} of them with {max_adapters} adapters")
    assert [step for step in full if step["requests"] > max_adapters], "never a full batch with company"
    assert [step for step in full if step["tokens"] == CHUNK], "never a full batch in the midst of a prefill"


async def test_for_a_few_seconds(tmp_path: Path) -> None:
    """The short form, part of every run."""
    await run(tmp_path, max_adapters=2, seconds=8, kinds=[None, None, *MARKS])


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("max_adapters", "seconds"), [(1, 20), (2, 75)])
async def test_for_longer(tmp_path: Path, max_adapters: int, seconds: float) -> None:
    """The long form; with one adapter at a time, too."""
    await run(tmp_path, max_adapters, seconds, kinds=[None, None, None, *MARKS, *MARKS])
