"""The whole inference service is killed at each stage of what it does, and started again by whoever runs it.

Its engine process dies with it, at whatever stage and however either ends: nobody is left to hold a device.
The manager pushes catalog and desired set to the new instance: what it wanted loaded comes back by itself.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from tests.support.fault_table import FaultCase, FaultTable
from tests.support.node_stages import STAGES, WANTED, WARM, WATERMARKS, Stage, at_stage
from tests.support.node_world import NodeWorld, Outcome
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
ALL: tuple[str | None, ...] = (*WARM, "demo/cold")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NodeWorld]:
    """One for all rows; the manager wants one adapter on the device throughout."""
    async with NodeWorld(tmp_path_factory.mktemp("front"), WATERMARKS) as world:
        assert (await world.load(WANTED)).is_whole
        yield world


async def kill(world: NodeWorld) -> psutil.Process:
    """SIGKILL the service; returns its engine, which must end by itself."""
    engine = world.engine()
    await asyncio.to_thread(world.stack.node.kill)
    return engine


async def gone(engine: psutil.Process, case: FaultCase) -> None:
    """The engine of a dead service ends; soon, but the machine may be busy."""
    try:
        await asyncio.to_thread(engine.wait, 20)
    except psutil.TimeoutExpired:
        case.lost.append(f"a ghost: {engine}")
        engine.kill()


async def start_again(world: NodeWorld, case: FaultCase, outcomes: list[Outcome]) -> None:
    """The row: what the calls came to, a new instance, and everything back without being asked for."""
    for outcome in outcomes:
        # The transport's own status: nobody was left to say when to try again.
        outcome.record(case, lambda failure: failure.code == "UNAVAILABLE")
    world.stack.node.start()
    began_s = time.monotonic()
    await world.stack.ready()
    await world.active(WANTED)
    case.recovered(await world.recovered((*ALL, WANTED), began_s))
    await world.check_rest(case)


@pytest.mark.parametrize("stage", STAGES, ids=str)
async def test_service_is_killed(world: NodeWorld, stage: Stage, faults: FaultTable) -> None:
    """SIGKILL of the front end alone."""
    with faults.case("service killed", str(stage)) as case:
        life = (await world.stack.model()).instance_id
        async with at_stage(world, stage) as outcomes:
            engine = await kill(world)
        await gone(engine, case)
        await start_again(world, case, outcomes)
        assert (await world.stack.model()).instance_id != life


async def test_service_is_killed_while_its_engine_starts(world: NodeWorld, faults: FaultTable) -> None:
    """Before the engine could tell that it is there, and when it is being started for the second time."""
    with faults.case("service killed", "start of the engine") as case:
        num_starts = len(world.starts())
        world.signal_engine(signal.SIGKILL)
        await eventually(lambda: len(world.starts()) > num_starts, 60)
        await gone(await kill(world), case)
        world.stack.node.start()
        assert world.stack.node.popen is not None
        front = psutil.Process(world.stack.node.popen.pid)
        await eventually(front.children, 60)
        spawned = front.children()
        await asyncio.to_thread(world.stack.node.kill)
        for engine in spawned:
            await gone(engine, case)
        await start_again(world, case, [])


async def test_service_is_killed_while_its_engine_is_stopped(world: NodeWorld, faults: FaultTable) -> None:
    """A stopped process can do nothing by itself: the kernel ends it."""
    with faults.case("service killed", "engine stopped") as case:
        engine = world.signal_engine(signal.SIGSTOP)
        await asyncio.to_thread(world.stack.node.kill)
        await gone(engine, case)
        await start_again(world, case, [])


async def test_service_is_stopped_and_goes_on(world: NodeWorld, faults: FaultTable) -> None:
    """SIGSTOP and SIGCONT of the front end: deadlines hold, nobody takes the engine for dead."""
    with faults.case("service stopped, goes on", "decode") as case:
        life = (await world.stack.model()).instance_id
        streams = [world.stream(name, max_tokens=1000) for name in ALL]
        for stream in streams:
            await stream.started()
        hurried = world.stream("demo/a", timeout_s=1.0)
        await hurried.started()
        assert world.stack.node.popen is not None
        os.kill(world.stack.node.popen.pid, signal.SIGSTOP)
        late = await hurried.ended()
        late.record(case, lambda failure: failure.code == "DEADLINE_EXCEEDED")
        os.kill(world.stack.node.popen.pid, signal.SIGCONT)
        began_s = time.monotonic()
        for stream in streams:
            outcome = await stream.ended()
            outcome.record(case, lambda _: False)
            assert len(outcome.tokens) == 1000
        case.recovered(await world.recovered(ALL, began_s))
        await world.check_rest(case)
        assert (await world.stack.model()).instance_id == life
