"""Flat or not flat, and whose memory it is."""

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from lorikeet_bench.process_memory import MemorySample, MemorySampler, trend, with_children

MIB = 1 << 20


def judged(used_mib: Callable[[float], float]) -> bool | None:
    """Whether six minutes of one sample a second are called flat."""
    samples = [MemorySample(float(s), int(used_mib(s) * MIB)) for s in range(360)]
    return trend("p", samples, 60.0).is_flat


@pytest.mark.parametrize(
    ("name", "used_mib", "is_flat"),
    [
        ("constant", lambda s: 100, True),
        ("filling up in the first minute", lambda s: min(100, 40 + s), True),
        ("noise of three percent", lambda s: 100 + 3 * random.Random(s).uniform(-1, 1), True),
        ("spikes to the double", lambda s: 200 if s % 20 == 0 else 100, True),
        ("a waist in the middle", lambda s: 80 if 150 < s < 250 else 100, True),
        ("a slow leak of one MiB in a minute", lambda s: 100 + s / 60, False),
        ("one step late", lambda s: 103 if s > 280 else 100, False),
        ("a leak under noise", lambda s: 100 + s / 60 + random.Random(s).uniform(-1, 1), False),
        ("a fall", lambda s: 100 if s < 200 else 95, False),
        ("a small process that moves a little", lambda s: 5 + (0.4 if s > 200 else 0), True),
        ("a small process that leaks", lambda s: 5 + s / 300, False),
    ],
)
def test_what_is_flat(name: str, used_mib: Callable[[float], float], is_flat: bool) -> None:
    """First fifth against last fifth after the first minute."""
    assert judged(used_mib) is is_flat, name


def test_too_short_to_say() -> None:
    """No verdict from a handful of samples."""
    samples = [MemorySample(float(s), MIB) for s in range(65)]
    assert trend("p", samples, 60.0).is_flat is None


def test_children_are_weighed_by_themselves() -> None:
    """A process, its child, and what becomes of them when one ends."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    parent = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        end_s = time.monotonic() + 30
        while len(found := with_children({"front end": parent.pid})) < 2:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        assert set(found) == {"front end", "engine"}
        sampler = MemorySampler(found, every_s=0.01)
        asyncio.run(_briefly(sampler))
        assert all(used > MIB for used in sampler.latest().values())
        assert not sampler.ended
    finally:
        os.killpg(parent.pid, 9)
        parent.wait()
    asyncio.run(_briefly(sampler))
    assert "front end" in sampler.ended


async def _briefly(sampler: MemorySampler) -> None:
    task = asyncio.create_task(sampler.run())
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
