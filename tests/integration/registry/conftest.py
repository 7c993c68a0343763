"""A real server of this test's own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adapter_manager.infra.redis.connection import RedisConnection, RedisOptions
from adapter_manager.infra.redis.embedded import EmbeddedValkey
from adapter_manager.infra.redis.registry import RedisRegistry


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedValkey]:
    """The embedded server, running."""
    server = EmbeddedValkey(tmp_path / "valkey")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def registry(server: EmbeddedValkey) -> AsyncIterator[RedisRegistry]:
    """A registry on it."""
    registry = RedisRegistry(RedisConnection(RedisOptions(server.url, timeout_s=1.0)))
    yield registry
    await registry.close()
