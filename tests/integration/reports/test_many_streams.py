"""32 streams over 8 adapters with random cancels: no token lost, none crossed, counters back at rest."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from lorikeet_bench.soak import SoakPlan, SoakTarget, run_soak, write_soak_base
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Eight adapters over four slots, so that slots change hands; few blocks, so some are preempted."""
    root = tmp_path_factory.mktemp("streams")
    flags = [
        *("--max-active-adapters", "4", "--max-running-requests", "16"),
        *("--max-step-tokens", "128", "--num-blocks", "160"),
    ]
    async with Stack(write_soak_base(root / "base"), root / "stack", node_flags=flags) as running:
        yield running


async def run(stack: Stack, root: Path, seconds: float, churners: int) -> None:
    """The whole scenario; every token is judged."""
    target = SoakTarget(stack.node_address, stack.manager_address, stack.token, tenant="demo")
    seed = int(os.environ.get("LORIKEET_TEST_SEED", "1"))
    plan = SoakPlan(duration_s=seconds, streams=32, adapters=8, churners=churners, seed=seed)
    result = await run_soak(target, plan, root)
    assert not result.failures, (result.failures, result.faults[:10])
    assert result.streams["finished: length"] > plan.streams
    assert result.streams["left: cancel"] > 0
    assert result.growth["adapter evictions"] > 0, "slots never changed hands: the test is too easy"


async def test_for_five_seconds(stack: Stack, tmp_path: Path) -> None:
    """The short form, part of every run; names stay what they are."""
    await run(stack, tmp_path, 5, churners=0)


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_for_a_minute(stack: Stack, tmp_path: Path) -> None:
    """The long form, while the adapters are replaced, unloaded and deleted."""
    await run(stack, tmp_path, 60, churners=2)
