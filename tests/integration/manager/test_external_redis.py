"""The manager on a Redis that somebody else runs, the distribution's own."""

from pathlib import Path

import pytest

from lorikeet.adapters.v1 import adapter_pb2 as pb
from tests.support.manager_process import ADAPTERS, managed, until_done
from tests.support.redis_server import BINARY, RedisServer
from tests.support.waiting import eventually

pytestmark = pytest.mark.skipif(BINARY is None, reason="redis-server is not installed (Debian: redis-server)")


async def test_a_registry_on_redis_survives_kills_of_either_side(tmp_path: Path) -> None:
    """Uploads, deletes and tenants go to the server named by the URL; no embedded one is started."""
    server = RedisServer(tmp_path / "redis")
    await server.start()
    try:
        async with managed(tmp_path, flags=("--redis-url", server.url)) as (manager, (node,)):
            await eventually(lambda: node.syncs, 10)
            journal: dict[str, str] = {}
            for name in ("attn-r1", "experts-r4"):
                reply = await manager.upload(ADAPTERS / name, f"demo/{name}")
                journal[f"tenants/demo/adapters/{name}"] = reply.revision.digest
            token = await manager.tenant("second")
            await server.kill()
            await server.start()
            assert await manager.names() == journal
            await manager.kill()
            await manager.start()
            assert await manager.names() == journal
            assert await manager.names(token) == {}
            await until_done(lambda: manager.call("DeleteAdapter", pb.DeleteAdapterRequest(name="attn-r1")))
            del journal["tenants/demo/adapters/attn-r1"]
            await eventually(lambda: set(node.names()) == {"demo/experts-r4"}, 10)
            assert await manager.names() == journal
            assert not (manager.data_dir / "valkey").exists()
    finally:
        await server.kill()
