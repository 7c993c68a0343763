"""A node at its limits: a store that hangs, a manager that is away, a full disk, a full pool, a full arena.

Nobody else waits with the one who must: streams on resident adapters go on, deadlines hold.
"""

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from lorikeet_bench import rigs
from tests.support.fault_table import FaultCase, FaultTable
from tests.support.node_world import NodeWorld
from tests.support.steady_clients import SteadyStreams

pytestmark = pytest.mark.asyncio(loop_scope="module")
STEADY: dict[str | None, int] = {"demo/a": 11, "demo/b": 22, None: 5}
WATERMARKS = {"demo/a": 11, "demo/b": 22, "demo/cold": 33}
COLD = "demo/cold"
# A rig's adapter in float32, on the node as in its payload.
ADAPTER_BYTES = 90112


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """A file system with room for three adapters and a half."""
    path = tmp_path_factory.mktemp("small") / "disk"
    path.mkdir()
    size = ADAPTER_BYTES * 7 // 2
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs a small file system, and mounting one is not allowed here: {error}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def streamed(tmp_path_factory: pytest.TempPathFactory, small_disk: Path) -> AsyncIterator[NodeWorld]:
    """The manager streams payloads to a node whose data directory is on the small disk."""
    world = NodeWorld(tmp_path_factory.mktemp("streamed"), WATERMARKS, is_streamed=True)
    flag = world.stack.node.command.index("--data-dir") + 1
    Path(world.stack.node.command[flag]).symlink_to(small_disk)
    async with world:
        yield world


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tight(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NodeWorld]:
    """The arena has room for two adapters, the host pool for four."""
    flags = [
        "--adapter-arena-bytes", str(2 * ADAPTER_BYTES), "--host-pool-bytes", str(4 * ADAPTER_BYTES),
    ]  # fmt: skip
    watermarks = WATERMARKS | {f"demo/n{i}": 40 + i for i in range(5)}
    async with NodeWorld(tmp_path_factory.mktemp("tight"), watermarks, node_flags=flags) as world:
        yield world


async def all_answer(world: NodeWorld, case: FaultCase, names: list[str], *, num_each: int = 1) -> None:
    """Ask all at once; each must answer whole."""
    for outcome in await asyncio.gather(*(world.ask(name) for name in names * num_each)):
        outcome.record(case, lambda _: False)


async def test_a_store_that_hangs(tight: NodeWorld, faults: FaultTable) -> None:
    """Who needs it waits, by the request's deadline at most; a load beside it and all streams go on."""
    with faults.case("store hangs", "adapter fetch") as case:
        async with SteadyStreams(tight.stack, STEADY) as streams:
            with tight.hung_store(COLD) as is_read:
                hurried = asyncio.create_task(tight.ask(COLD, timeout_s=1.5))
                patient = asyncio.create_task(tight.ask(COLD))
                await is_read()
                (await hurried).record(case, lambda failure: failure.code == "DEADLINE_EXCEEDED")
                await all_answer(tight, case, ["demo/n0"])
                await streams.progress()
                assert not patient.done()
            began_s = time.monotonic()
            (await patient).record(case, lambda _: False)
            case.recovered(time.monotonic() - began_s)
        case.lost += [*streams.unclear, *filter(None, [await tight.stack.at_rest()])]
        case.wrong += streams.wrong


async def test_more_adapters_than_pool_and_arena_hold(tight: NodeWorld, faults: FaultTable) -> None:
    """Eight take turns in two places, three requests each; the ninth could never fit and is told so."""
    with faults.case("pool and arena full", "load") as case:
        names = list(tight.watermarks)
        began_s = time.monotonic()
        await all_answer(tight, case, names, num_each=3)
        case.recovered(time.monotonic() - began_s)
        rng = np.random.default_rng(1)
        tensors = {
            f"base_model.model.model.layers.{layer}.self_attn.{site}.lora_{side}.weight": rng.random(shape)
            for layer in range(2)
            for site in ("q_proj", "k_proj", "v_proj", "o_proj")
            for side, shape in (("A", (128, 64)), ("B", (64, 128)))
        }
        path = rigs.write_adapter(
            tight.store.parent / "large",
            tensors,
            r=128,
            alpha=1,
            target_modules=["q_proj", "k_proj", "v_proj"],
        )
        await tight.stack.upload(path, "demo/large")
        tight.watermarks["demo/large"] = 0
        too_large = await tight.ask("demo/large")
        too_large.record(case, lambda failure: failure.reason == "ADAPTER_TOO_LARGE")
        assert not too_large.is_whole
        await all_answer(tight, case, names)
        assert too_large.failure is not None
        assert too_large.failure.code == "FAILED_PRECONDITION"


async def test_a_disk_full_of_adapters(streamed: NodeWorld, faults: FaultTable) -> None:
    """More than it holds pass through it, one making room for the other."""
    with faults.case("disk cache full", "of other adapters") as case:
        for token in range(40, 45):
            name = f"demo/n{token}"
            await streamed.upload(name, token)
            began_s = time.monotonic()
            await all_answer(streamed, case, [name])
            case.recovered(time.monotonic() - began_s)
        await all_answer(streamed, case, list(streamed.watermarks))
        cached = [name for name in streamed.watermarks if streamed.cached(name).exists()]
        assert 1 <= len(cached) <= 3


async def test_a_disk_full_of_something_else(
    streamed: NodeWorld, small_disk: Path, faults: FaultTable
) -> None:
    """Nothing can make room: told so at once. Afterwards a load brings the adapter."""
    with faults.case("disk cache full", "of something else") as case:
        for name in streamed.watermarks:
            await streamed.unloaded(name)
            shutil.rmtree(streamed.cached(name), ignore_errors=True)
        await streamed.recovered(["demo/a", "demo/b"], time.monotonic())
        for name in ("demo/a", "demo/b"):
            shutil.rmtree(streamed.cached(name))
        ballast = small_disk / "ballast"
        async with SteadyStreams(streamed.stack, STEADY) as streams:
            free = shutil.disk_usage(small_disk).free
            ballast.write_bytes(os.urandom(free - ADAPTER_BYTES // 2))
            try:
                for _ in range(2):
                    refused = await streamed.ask(COLD)
                    refused.record(case, lambda failure: failure.code == "FAILED_PRECONDITION")
                    assert refused.failure is not None
                    assert "No space left on device" in refused.failure.message
                    assert str(small_disk) not in refused.failure.message
            finally:
                ballast.unlink()
            began_s = time.monotonic()
            (await streamed.load(COLD)).record(case, lambda _: False)
            case.recovered(await streamed.recovered([COLD], began_s))
            await streams.progress()
        case.lost += [*streams.unclear, *filter(None, [await streamed.stack.at_rest()])]
        case.wrong += streams.wrong


async def test_a_manager_that_is_away(streamed: NodeWorld, faults: FaultTable) -> None:
    """What only it can stream waits for it, by the deadline at most; once it is back the request is whole."""
    with faults.case("manager killed", "adapter wait on a node") as case:
        await streamed.unloaded(COLD)
        shutil.rmtree(streamed.cached(COLD))
        async with SteadyStreams(streamed.stack, STEADY) as streams:
            await asyncio.to_thread(streamed.stack.manager.kill)
            hurried = asyncio.create_task(streamed.ask(COLD, timeout_s=1.5))
            patient = asyncio.create_task(streamed.ask(COLD))
            (await hurried).record(case, lambda failure: failure.code == "DEADLINE_EXCEEDED")
            await streams.progress()
            assert not patient.done()
            streamed.stack.manager.start()
            began_s = time.monotonic()
            (await patient).record(case, lambda _: False)
            case.recovered(time.monotonic() - began_s)
            await streams.progress()
        case.lost += [*streams.unclear, *filter(None, [await streamed.stack.at_rest()])]
        case.wrong += streams.wrong
