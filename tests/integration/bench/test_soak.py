"""The soak against real services finds what an outsider breaks."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from lorikeet.adapters.v1 import adapter_pb2
from lorikeet_bench.rigs import write_moe_watermark
from lorikeet_bench.soak import FaultKind, SoakPlan, SoakProgress, SoakTarget, run_soak, write_soak_base
from lorikeet_bench.soak.plan import SOAK_SHAPE
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Room for all: these runs are about the judge, not about the load."""
    root = tmp_path_factory.mktemp("soak")
    async with Stack(write_soak_base(root / "base"), root / "stack") as running:
        yield running


def target_of(stack: Stack) -> SoakTarget:
    """The stack as a soak sees it; the bootstrap tenant is demo."""
    assert stack.node.popen is not None
    return SoakTarget(
        inference=stack.node_address,
        manager=stack.manager_address,
        token=stack.token,
        tenant="demo",
        processes={"front end": stack.node.popen.pid},
        disk={"artifacts": stack.root / "manager" / "artifacts"},
    )


@pytest.mark.timeout(240)
async def test_it_finds_a_name_that_answers_with_what_it_should_not(stack: Stack, tmp_path: Path) -> None:
    """Somebody else pushes under a name of the soak: wrong revisions answer, the registry differs."""
    stranger = write_moe_watermark(tmp_path / "stranger", 7, SOAK_SHAPE)
    pushed: list[asyncio.Task[object]] = []

    def push_once(now: SoakProgress) -> None:
        if now.stage == "soaking" and not pushed:
            pushed.append(asyncio.create_task(stack.upload(stranger, "demo/soak-00", request_id="stranger")))

    plan = SoakPlan(duration_s=6, streams=12, adapters=2, churners=0)
    result = await run_soak(target_of(stack), plan, tmp_path / "adapters", push_once)
    assert pushed[0].done()
    assert not result.has_passed
    assert result.wrong > 0
    found = {fault.kind for fault in result.faults}
    assert FaultKind.WRONG_REVISION in found
    first = next(fault for fault in result.faults if fault.kind is FaultKind.WRONG_REVISION)
    assert first.facts["adapter"] is not None
    assert first.facts["history"]


@pytest.mark.timeout(240)
async def test_it_finds_what_is_left_over(stack: Stack, tmp_path: Path) -> None:
    """An adapter that nobody acknowledged stands in the list, and its files stay."""
    stranger = write_moe_watermark(tmp_path / "stranger", 9, SOAK_SHAPE)
    pushed: list[asyncio.Task[object]] = []

    def push_once(now: SoakProgress) -> None:
        if now.stage == "soaking" and not pushed:
            pushed.append(asyncio.create_task(stack.upload(stranger, "demo/left", request_id="left")))

    plan = SoakPlan(duration_s=4, streams=4, adapters=2, churners=1, return_s=3)
    result = await run_soak(target_of(stack), plan, tmp_path / "adapters", push_once)
    assert any("demo/adapters/left" in fault.message for fault in result.faults)
    assert any("disk bytes: artifacts did not return" in failure for failure in result.failures)
    await stack.adapters().DeleteAdapter(
        adapter_pb2.DeleteAdapterRequest(name="demo/left"), metadata=stack.auth(), timeout=30
    )
