"""A revision's files come to harm where they lie: in the artifact store, in the node's disk cache, in both.

A damaged adapter never answers. Where a whole copy is left the node fetches it and its requests only wait;
where none is, they end with FAILED_PRECONDITION and why, no read is repeated in the meantime, and all others
stream on. Once the files are whole again, a load brings the adapter back.
"""

import hashlib
import json
import secrets
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.fault_table import FaultCase, FaultTable
from tests.support.node_world import NodeWorld, Outcome
from tests.support.payload_damage import DAMAGES, Damage
from tests.support.steady_clients import SteadyStreams

pytestmark = pytest.mark.asyncio(loop_scope="module")
STEADY: dict[str | None, int] = {"demo/a": 11, "demo/b": 22, None: 5}
WATERMARKS = {"demo/a": 11, "demo/b": 22, "demo/cold": 33, "demo/other": 44}
COLD = "demo/cold"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NodeWorld]:
    """The node reads the artifact store itself."""
    async with NodeWorld(tmp_path_factory.mktemp("shared"), WATERMARKS) as world:
        yield world


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def streamed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NodeWorld]:
    """The manager streams payloads into the node's disk cache."""
    async with NodeWorld(tmp_path_factory.mktemp("streamed"), WATERMARKS, is_streamed=True) as world:
        assert (await world.ask("demo/other")).is_whole
        yield world


def failed_loads(world: NodeWorld, name: str) -> int:
    """How often the node tried in vain, by its log."""
    events = Counter[str]()
    for line in world.stack.node.log.read_text().splitlines():
        if world.digests[name] in line and line.startswith("{"):
            events[json.loads(line)["event"]] += 1
    return events["residency.load_failed"]


async def refused(world: NodeWorld, case: FaultCase, name: str = COLD) -> Outcome:
    """Ask for an adapter that cannot be served: a clear end, no token, none of the operator's paths."""
    outcome = await world.ask(name)
    if outcome.is_whole or outcome.tokens:
        case.wrong.append(f"{name} answered {outcome.tokens}")
    outcome.record(case, lambda failure: failure.code == "FAILED_PRECONDITION")
    assert outcome.failure is not None
    assert outcome.failure.reason == "ADAPTER_UNAVAILABLE"
    assert str(world.store.parent) not in outcome.failure.message
    return outcome


async def whole_again(world: NodeWorld, case: FaultCase, streams: SteadyStreams) -> None:
    """The files are whole: one load, and the adapter answers; the others never stopped."""
    began_s = time.monotonic()
    (await world.load(COLD)).record(case, lambda _: False)
    case.recovered(await world.recovered([COLD], began_s))
    await streams.progress()
    await world.unloaded(COLD)
    case.lost += streams.unclear
    case.wrong += streams.wrong


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
async def test_damage_in_the_store(shared: NodeWorld, damage: Damage, faults: FaultTable) -> None:
    """On request and on the manager's load: refused, and read again only when somebody asks anew."""
    with faults.case("in the artifact store", str(damage)) as case:
        await shared.unloaded(COLD)
        async with SteadyStreams(shared.stack, STEADY) as streams:
            with damage.done_to(shared.stored(COLD), shared.stored("demo/other")):
                tries = failed_loads(shared, COLD)
                for _ in range(4):
                    await refused(shared, case)
                assert failed_loads(shared, COLD) <= tries + 1
                assert not (await shared.load(COLD)).is_whole
                await refused(shared, case)
                await streams.progress()
            await whole_again(shared, case, streams)
        if held := await shared.stack.at_rest():
            case.lost.append(held)


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
async def test_damage_in_the_disk_cache(streamed: NodeWorld, damage: Damage, faults: FaultTable) -> None:
    """The store's copy is whole: it is fetched once more, and the request only waits."""
    with faults.case("in the disk cache", str(damage)) as case:
        await streamed.recovered([COLD], time.monotonic())
        await streamed.unloaded(COLD)
        damage.harm(streamed.cached(COLD), streamed.cached("demo/other"))
        began_s = time.monotonic()
        async with SteadyStreams(streamed.stack, STEADY) as streams:
            (await streamed.ask(COLD)).record(case, lambda _: False)
            case.recovered(time.monotonic() - began_s)
            await streams.progress()
        case.lost += streams.unclear
        case.wrong += streams.wrong
        for name in ("manifest.json", "payload"):
            assert (streamed.cached(COLD) / name).read_bytes() == (streamed.stored(COLD) / name).read_bytes()


@pytest.mark.parametrize("damage", [DAMAGES[1], DAMAGES[4], DAMAGES[8], DAMAGES[-1]], ids=str)
async def test_damage_in_both(streamed: NodeWorld, damage: Damage, faults: FaultTable) -> None:
    """What the manager streams is no better, or it has nothing to stream: the request ends, and soon."""
    with faults.case("in store and disk cache", str(damage)) as case:
        await streamed.recovered([COLD], time.monotonic())
        await streamed.unloaded(COLD)
        async with SteadyStreams(streamed.stack, STEADY) as streams:
            with damage.done_to(streamed.stored(COLD), streamed.stored("demo/other")):
                damage.harm(streamed.cached(COLD), streamed.cached("demo/other"))
                for _ in range(3):
                    await refused(streamed, case)
                assert not (await streamed.load(COLD)).is_whole
                await refused(streamed, case)
                await streams.progress()
            await whole_again(streamed, case, streams)
        if held := await streamed.stack.at_rest():
            case.lost.append(held)


async def mended_by_a_push(world: NodeWorld, case: FaultCase, request_id: str) -> None:
    """The operator's way out: the same files again. The next request is answered, at once and right."""
    digest, began_s = world.digests[COLD], time.monotonic()
    reply, sent = await world.push(COLD, request_id)
    assert (reply.revision.digest, reply.created) == (digest, False)
    assert sent > 0, "the manager says that it has what is damaged"
    (await world.ask(COLD)).record(case, lambda _: False)
    case.recovered(time.monotonic() - began_s)
    case.wrong += unlike_at_first(world)
    assert not (await world.push(COLD, request_id))[1], "what is whole need not be sent"


def unlike_at_first(world: NodeWorld) -> list[str]:
    """Which of the adapter's stored files are not what their digests say, by the contract alone."""
    data = (world.stored(COLD) / "manifest.json").read_bytes()
    found = [] if hashlib.sha256(data).hexdigest() == world.digests[COLD] else ["manifest.json"]
    payload = (world.stored(COLD) / "payload").read_bytes()
    for layer in json.loads(data)["layers"]:
        piece = payload[layer["offset"] : layer["offset"] + layer["num_bytes"]]
        if hashlib.sha256(piece).hexdigest() != layer["sha256"]:
            found.append(f"payload, layer {layer['layer']}")
    return found


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
@pytest.mark.parametrize("is_same_id", [True, False], ids=["the same id", "another id"])
async def test_pushing_again_mends_the_store(
    shared: NodeWorld, damage: Damage, is_same_id: bool, faults: FaultTable
) -> None:
    """The receipt of an earlier push with the same id does not answer for files that are not whole."""
    request_id = secrets.token_hex(8)
    how = "the same id" if is_same_id else "another id"
    with faults.case(f"in the artifact store, pushed again with {how}", str(damage)) as case:
        await shared.push(COLD, request_id)
        await shared.unloaded(COLD)
        async with SteadyStreams(shared.stack, STEADY) as streams:
            damage.harm(shared.stored(COLD), shared.stored("demo/other"))
            for _ in range(2):
                await refused(shared, case)
            await mended_by_a_push(shared, case, request_id if is_same_id else secrets.token_hex(8))
            await streams.progress()
        case.lost += streams.unclear
        case.wrong += streams.wrong
        if held := await shared.stack.at_rest():
            case.lost.append(held)


@pytest.mark.parametrize("damage", [DAMAGES[1], DAMAGES[8], DAMAGES[14]], ids=str)
async def test_pushing_again_mends_what_the_manager_streams(
    streamed: NodeWorld, damage: Damage, faults: FaultTable
) -> None:
    """The node's copy is damaged, too, and it had been refused another one."""
    request_id = secrets.token_hex(8)
    with faults.case("in store and disk cache, pushed again", str(damage)) as case:
        await streamed.push(COLD, request_id)
        await streamed.recovered([COLD], time.monotonic())
        await streamed.unloaded(COLD)
        for directory in (streamed.stored(COLD), streamed.cached(COLD)):
            damage.harm(directory, directory)
        await refused(streamed, case)
        await mended_by_a_push(streamed, case, request_id)


def make_immutable(path: Path, *, is_on: bool) -> None:
    """Let nobody change or delete it, root included; skips where that is not possible."""
    try:
        subprocess.run(["chattr", "+i" if is_on else "-i", str(path)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs chattr +i, which is not possible here: {error}")


async def test_a_damaged_copy_that_cannot_be_removed(streamed: NodeWorld, faults: FaultTable) -> None:
    """Nothing can take its place: its requests end, each with one read at most, and others load beside it."""
    with faults.case("in the disk cache", "a bit flipped, not to be deleted") as case:
        await streamed.recovered([COLD], time.monotonic())
        await streamed.unloaded(COLD)
        directory = streamed.cached(COLD)
        DAMAGES[1].harm(directory, directory)
        make_immutable(directory, is_on=True)
        async with SteadyStreams(streamed.stack, STEADY) as streams:
            try:
                for _ in range(3):
                    await refused(streamed, case)
                await streamed.unloaded("demo/other")
                (await streamed.ask("demo/other")).record(case, lambda _: False)
                await streams.progress()
            finally:
                make_immutable(directory, is_on=False)
            await whole_again(streamed, case, streams)
        if held := await streamed.stack.at_rest():
            case.lost.append(held)
