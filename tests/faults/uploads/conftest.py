"""A stack with small disks for each module, and clients that ask throughout each test."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.steady_clients import STEADY, SteadyReads, SteadyStreams
from tests.support.upload_world import Clients, UploadWorld, upload_world


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[UploadWorld]:
    """Two resident adapters."""
    async with upload_world(tmp_path_factory.mktemp("uploads")) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def clients(world: UploadWorld) -> AsyncIterator[Clients]:
    """They ask throughout each test."""
    async with (
        SteadyStreams(world.stack, {**STEADY, None: 5}) as streams,
        SteadyReads(world.stack, world.steady) as reads,
    ):
        yield streams, reads
