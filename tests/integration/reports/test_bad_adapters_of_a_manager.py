"""Adapters that were registered in good order and that a node cannot load any more: each fails alone.

Sources: vllm-project/vllm#11727, #13698, kubernetes-sigs/gateway-api-inference-extension#584.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
import pytest_asyncio

from lorikeet.adapters.v1 import adapter_pb2
from lorikeet_bench import rigs
from lorikeet_rpc.errors import RpcFailure, from_rpc_error
from tests.support.stack import Stack
from tests.support.steady_clients import SteadyStreams

pytestmark = pytest.mark.asyncio(loop_scope="module")
STEADY: dict[str | None, int] = {"demo/a": 11, "demo/b": 22}
MAX_RANK = 4


@dataclass
class World:
    """A stack over a store that the node may share or not."""

    stack: Stack
    root: Path
    digests: dict[str, str]

    async def upload(self, name: str, directory: Path) -> None:
        """Register an adapter."""
        self.digests[name] = (await self.stack.upload(directory, name)).revision.digest

    def lose(self, name: str) -> None:
        """Delete a revision's files behind the manager's back."""
        shutil.rmtree(next(self.root.rglob(f"revisions/{self.digests[name]}")))

    async def failure(self, name: str, timeout_s: float = 60.0) -> RpcFailure:
        """How a request for it ends; it must not answer."""
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await self.stack.generate([5], adapter=name, max_tokens=4, timeout_s=timeout_s)
        return from_rpc_error(error.value)

    async def load(self, name: str) -> str:
        """Have the manager load it; returns the failure that its placement shows."""
        request = adapter_pb2.LoadAdapterRequest(name=name)
        reply = await self.stack.adapters().LoadAdapter(request, metadata=self.stack.auth(), timeout=60)
        (placement,) = reply.placements
        return placement.failure

    async def answers_a_new_one(self, name: str) -> None:
        """A good adapter is pushed, loaded and answers."""
        await self.upload(name, rigs.write_moe_watermark(self.root / name, 33))
        assert await self.load(name) == ""
        assert (await self.stack.generate([5], adapter=name, max_tokens=4)).token_ids == [33] * 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """The node reads the store. It was restarted with a lower rank limit than adapters were registered by."""
    root = tmp_path_factory.mktemp("shared")
    async with Stack(rigs.write_copy_base(root / "base"), root / "stack") as stack:
        world = World(stack, root, {})
        for name, token in (("demo/a", 11), ("demo/b", 22), ("demo/lost", 44)):
            await world.upload(name, rigs.write_moe_watermark(root / name, token))
        await world.upload("demo/high", write_high_rank(root / "high"))
        await asyncio.to_thread(stack.node.stop)
        stack.node.command += ["--max-rank", str(MAX_RANK)]
        stack.node.start()
        await stack.ready()
        for name in ("demo/a", "demo/b"):
            await stack.wait_known(name)
        yield world


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def streamed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """The node cannot read the store: its manager streams payloads to it."""
    root = tmp_path_factory.mktemp("streamed")
    stack = Stack(rigs.write_copy_base(root / "base"), root / "stack")
    # One path that means another directory in each process: it is the manager's alone.
    stack.manager.cwd = root / "stack"
    stack.manager.command += ["--store-url", "file:///proc/self/cwd/artifacts"]
    async with stack:
        world = World(stack, root, {})
        for name, token in (("demo/a", 11), ("demo/b", 22), ("demo/lost", 44)):
            await world.upload(name, rigs.write_moe_watermark(root / name, token))
        yield world


def write_high_rank(path: Path) -> Path:
    """An adapter of twice the later limit."""
    rng, rank = np.random.default_rng(0), 2 * MAX_RANK
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.v_proj.lora_{side}.weight": rng.random(shape)
        for layer in range(2)
        for side, shape in (("A", (rank, 64)), ("B", (64, rank)))
    }
    return rigs.write_adapter(path, tensors, r=rank, alpha=rank, target_modules=["v_proj"])


async def test_a_rank_over_the_nodes_limit(shared: World) -> None:
    """Registered while the limit was higher: refused on request and by the load, each with the numbers."""
    async with SteadyStreams(shared.stack, STEADY, num_each=2) as streams:
        for _ in range(2):
            failure = await shared.failure("demo/high")
            assert (failure.code, failure.reason) == ("FAILED_PRECONDITION", "ADAPTER_TOO_LARGE")
            assert f"rank {2 * MAX_RANK}" in failure.message
        assert f"rank {2 * MAX_RANK} is over" in await shared.load("demo/high")
        await shared.answers_a_new_one("demo/good1")
        await streams.progress()
    assert (streams.wrong, streams.unclear) == ([], [])


async def test_files_deleted_from_a_store_that_the_node_reads(shared: World) -> None:
    """On request and on a load."""
    await check_lost_files(shared)


async def test_files_deleted_where_only_the_manager_could_send_them(streamed: World) -> None:
    """The manager says that it cannot, so the request ends now and not when its wait for it is over."""
    await check_lost_files(streamed)


async def check_lost_files(world: World) -> None:
    """Told so each time; the next adapter loads; pushed again the lost one is back."""
    world.lose("demo/lost")
    async with SteadyStreams(world.stack, STEADY, num_each=2) as streams:
        for _ in range(2):
            failure = await world.failure("demo/lost")
            assert (failure.code, failure.reason) == ("FAILED_PRECONDITION", "ADAPTER_UNAVAILABLE")
        assert "is not in the artifact store" in await world.load("demo/lost")
        failure = await world.failure("demo/lost")
        assert failure.code == "FAILED_PRECONDITION"
        await world.answers_a_new_one("demo/good2")
        await streams.progress()
        # Pushed again it is whole again, and the same revision.
        before = world.digests["demo/lost"]
        await world.upload("demo/lost", rigs.write_moe_watermark(world.root / "again", 44))
        assert world.digests["demo/lost"] == before
        assert await world.load("demo/lost") == ""
        assert (await world.stack.generate([5], adapter="demo/lost", max_tokens=4)).token_ids == [44] * 4
    assert (streams.wrong, streams.unclear) == ([], [])
    assert not await world.stack.at_rest()


async def test_adapters_of_another_model(shared: World) -> None:
    """The node comes back with a model of other shapes: theirs are NOT_FOUND, new ones of its own answer."""
    stack = shared.stack
    shape = rigs.RigShape(vocab=128)
    await asyncio.to_thread(stack.node.stop)
    model = stack.node.command.index("--model-dir") + 1
    stack.node.command[model] = str(rigs.write_copy_base(shared.root / "wide", shape))
    stack.node.start()
    await stack.ready()
    await shared.upload("demo/wide", rigs.write_moe_watermark(shared.root / "w", 99, shape))
    async with SteadyStreams(stack, {"demo/wide": 99, None: 5}, num_each=2) as streams:
        for name in STEADY:
            assert name is not None
            assert (await shared.failure(name)).code == "NOT_FOUND"
            assert "another base model" in await shared.load(name)
        await streams.progress()
    assert (streams.wrong, streams.unclear) == ([], [])
