"""The engine process is killed or stopped at each stage of what it does; its front end lives.

All that the node had accepted ends with UNAVAILABLE and when to try again, or whole; another engine answers,
with the right adapters, and has what the manager wants on the device without being asked; counters are back,
and no process or socket of the dead one is left.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from lorikeet_rpc.errors import RpcFailure
from tests.support.fault_table import FaultCase, FaultTable
from tests.support.node_stages import STAGES, WANTED, WARM, WATERMARKS, Stage, at_stage
from tests.support.node_world import NodeWorld, Outcome

pytestmark = pytest.mark.asyncio(loop_scope="module")
STALL_TIMEOUT_S = 4.0
FLAGS = ["--stall-timeout-s", str(STALL_TIMEOUT_S), "--drain-grace-s", "2", "--max-active-adapters", "4"]
ALL: tuple[str | None, ...] = (*WARM, "demo/cold")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NodeWorld]:
    """One for all rows: each ends with a node that answers."""
    async with NodeWorld(tmp_path_factory.mktemp("engine"), WATERMARKS, node_flags=FLAGS) as world:
        assert (await world.load(WANTED)).is_whole
        yield world


def is_clear(failure: RpcFailure) -> bool:
    """How the calls of a dead engine may end."""
    return failure.code == "UNAVAILABLE" and failure.retry_after_s is not None


async def finish(
    world: NodeWorld, case: FaultCase, outcomes: list[Outcome], dead: psutil.Process, began_s: float
) -> None:
    """The row: what each call came to, that all adapters answer again, and that nothing is left."""
    for outcome in outcomes:
        outcome.record(case, is_clear)
    case.recovered(await world.recovered(ALL, began_s))
    await world.active(WANTED)
    await world.check_rest(case)
    if dead.is_running():
        case.lost.append(f"the old engine still runs: {dead}")


@pytest.mark.parametrize("stage", STAGES, ids=str)
async def test_engine_is_killed(world: NodeWorld, stage: Stage, faults: FaultTable) -> None:
    """SIGKILL: noticed at once, also where nothing ran."""
    with faults.case("engine killed", str(stage)) as case:
        life = (await world.stack.model()).instance_id
        async with at_stage(world, stage) as outcomes:
            dead, began_s = world.signal_engine(signal.SIGKILL), time.monotonic()
        await finish(world, case, outcomes, dead, began_s)
        assert (await world.stack.model()).instance_id != life


@pytest.mark.parametrize("stage", STAGES, ids=str)
async def test_engine_stalls(world: NodeWorld, stage: Stage, faults: FaultTable) -> None:
    """SIGSTOP: deadlines hold meanwhile, and what is silent for too long is replaced."""
    with faults.case("engine stopped", str(stage)) as case:
        async with at_stage(world, stage) as outcomes:
            hurried = world.stream("demo/b", timeout_s=1.5)
            await hurried.started()
            dead, began_s = world.signal_engine(signal.SIGSTOP), time.monotonic()
        late = await hurried.ended()
        assert late.failure is not None
        assert late.failure.code in {"DEADLINE_EXCEEDED", "UNAVAILABLE"}, late.failure
        late.record(case, lambda failure: failure.code == "DEADLINE_EXCEEDED" or is_clear(failure))
        await finish(world, case, outcomes, dead, began_s)


async def test_engine_pauses(world: NodeWorld, faults: FaultTable) -> None:
    """SIGSTOP for less than counts as a stall: the same engine goes on, every stream ends whole."""
    with faults.case("engine stopped, goes on", "decode") as case:
        life = (await world.stack.model()).instance_id
        streams = [world.stream(name, max_tokens=1000) for name in ALL]
        for stream in streams:
            await stream.started()
        engine = world.signal_engine(signal.SIGSTOP)
        await asyncio.sleep(1.0)
        engine.send_signal(signal.SIGCONT)
        began_s = time.monotonic()
        for stream in streams:
            outcome = await stream.ended()
            outcome.record(case, lambda _: False)
            assert len(outcome.tokens) == 1000
        case.recovered(await world.recovered(ALL, began_s))
        await world.check_rest(case)
        assert (await world.stack.model()).instance_id == life


async def test_engine_is_killed_twice(world: NodeWorld, faults: FaultTable) -> None:
    """The second time as soon as it answers again."""
    with faults.case("engine killed", "twice in a row") as case:
        outcomes: list[Outcome] = []
        began_s = time.monotonic()
        for _ in range(2):
            stream = world.stream("demo/a")
            await stream.started()
            dead, began_s = world.signal_engine(signal.SIGKILL), time.monotonic()
            outcomes.append(await stream.ended())
            await world.recovered(["demo/a"], began_s)
        await finish(world, case, outcomes, dead, began_s)


async def test_engine_dies_at_every_start(world: NodeWorld, faults: FaultTable) -> None:
    """A crash loop: tried again at a growing pace, NOT_SERVING meanwhile, refused with when to try again."""
    with faults.case("engine killed", "crash loop") as case:
        before = len(world.starts())
        world.gates.hold("start")
        dead = world.signal_engine(signal.SIGKILL)
        try:
            while len(world.starts()) < before + 3:
                (await world.ask("demo/a")).record(case, is_clear)
                await asyncio.sleep(0.1)
            assert not await world.is_serving()
            assert world.stack.node.popen is not None
            assert world.stack.node.popen.poll() is None
            first, second, third = world.starts()[before : before + 3]
            assert second - first >= 1.0
            assert third - second >= 2.0
        finally:
            world.gates.release_all()
        began_s = time.monotonic()
        await finish(world, case, [], dead, began_s)
        await world.serving()


async def test_service_whose_engine_cannot_start(world: NodeWorld, faults: FaultTable) -> None:
    """It ends with an exit code and says why: whoever runs it decides."""
    with faults.case("engine fails", "start of the service") as case:
        node = world.stack.node
        await asyncio.to_thread(node.stop)
        world.gates.hold("start")
        try:
            node.start()
            assert node.popen is not None
            assert await asyncio.to_thread(node.popen.wait, 60) == 1
            assert "the device does not answer" in node.tail()
        finally:
            world.gates.release_all()
        node.start()
        began_s = time.monotonic()
        await world.stack.ready()
        case.recovered(await world.recovered(ALL, began_s))
        await world.check_rest(case)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_engine_fails_while_the_service_drains(
    world: NodeWorld, number: signal.Signals, faults: FaultTable
) -> None:
    """SIGTERM, then the engine is gone or silent: the stream ends clearly, the service in its time."""
    fault = "engine killed" if number is signal.SIGKILL else "engine stopped"
    with faults.case(fault, "drain") as case:
        node = world.stack.node
        stream = world.stream("demo/a")
        await stream.started()
        assert node.popen is not None
        node.popen.terminate()
        await asyncio.sleep(0.3)
        engine = world.signal_engine(number)
        (await stream.ended()).record(case, lambda failure: failure.code in {"UNAVAILABLE", "CANCELLED"})
        assert await asyncio.to_thread(node.popen.wait, 30) == 0, node.tail()
        assert not engine.is_running()
        node.start()
        began_s = time.monotonic()
        await world.stack.ready()
        case.recovered(await world.recovered(ALL, began_s))
        await world.check_rest(case)
