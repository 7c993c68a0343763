"""Kills, stops and absences of the manager, its store and its nodes."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from lorikeet.adapters.v1 import adapter_pb2 as pb
from tests.support.manager_process import (
    ADAPTERS,
    Managed,
    ManagerProcess,
    failure_of,
    managed,
    pid,
    revision_files,
    until_done,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_acknowledged_registrations_survive_kills_of_manager_store_and_node(tmp_path: Path) -> None:
    """The list equals the journal after each, on the manager and on two nodes."""
    async with managed(tmp_path, num_nodes=2) as (manager, nodes):
        await eventually(lambda: all(n.syncs for n in nodes), 10)
        journal: dict[str, str] = {}
        for name in ("attn-r1", "attn-r8", "experts-r4"):
            reply = await manager.upload(ADAPTERS / name, f"demo/{name}")
            journal[f"tenants/demo/adapters/{name}"] = reply.revision.digest
        short = {name.replace("tenants/", "").replace("/adapters/", "/"): d for name, d in journal.items()}

        await manager.kill()
        await manager.start()
        assert await manager.names() == journal

        (store,) = [p for p in psutil.Process(pid(manager)).children() if "valkey" in p.name()]
        os.kill(store.pid, signal.SIGKILL)
        assert await manager.names() == journal  # from memory until it is back

        await nodes[0].restart()
        await eventually(lambda: all(n.names() == short for n in nodes), 10)

        await until_done(lambda: manager.call("DeleteAdapter", pb.DeleteAdapterRequest(name="attn-r1")))
        del journal["tenants/demo/adapters/attn-r1"], short["demo/attn-r1"]
        assert await manager.names() == journal
        await eventually(lambda: all(n.names() == short for n in nodes), 10)
        assert revision_files(manager) == set(journal.values())


async def test_reads_go_on_and_writes_are_refused_while_the_store_is_away(stack: Managed) -> None:
    """Stopped, not killed: connections hang. Writes get UNAVAILABLE with RetryInfo, and work again after."""
    manager, (node,) = stack
    reply = await manager.upload(ADAPTERS / "attn-r8", "demo/a")
    await eventually(node.names)
    (store,) = [p for p in psutil.Process(pid(manager)).children() if "valkey" in p.name()]
    store.suspend()
    try:
        adapter = (await manager.call("GetAdapter", pb.GetAdapterRequest(name="a"))).adapter
        assert adapter.current_digest == reply.revision.digest
        pin = pb.PinAdapterRequest(name="a", pinned=True)
        failure = await failure_of(manager.call("PinAdapter", pin))
        assert (failure.code, failure.reason) == ("UNAVAILABLE", "REGISTRY_UNAVAILABLE")
        assert failure.retry_after_s
        assert node.names() == {"demo/a": reply.revision.digest}
    finally:
        store.resume()
    await until_done(lambda: manager.call("PinAdapter", pin))
    assert (await manager.call("GetAdapter", pb.GetAdapterRequest(name="a"))).adapter.pinned


async def test_a_second_manager_on_the_same_directory_says_who_is_in_the_way(
    stack: Managed, tmp_path: Path
) -> None:
    """Exit code 1, one line, no traceback; the first goes on."""
    manager, nodes = stack
    second = ManagerProcess(manager.data_dir.parent, nodes)
    second.process.log = tmp_path / "second.log"
    second.process.start()
    assert second.process.popen
    assert await asyncio.to_thread(second.process.popen.wait, 20) == 1
    text = second.process.log.read_text()
    assert str(pid(manager)) in text
    assert "Traceback" not in text
    assert await manager.names() == {}


async def test_it_stops_in_order_and_keeps_its_token(stack: Managed) -> None:
    """Exit code 0, the store's process gone, the same bootstrap token after the next start."""
    manager, _ = stack
    token = manager.token
    children = psutil.Process(pid(manager)).children()
    assert await manager.stop() == 0
    assert not any(child.is_running() for child in children)
    await manager.start()
    assert manager.token == token
    assert await manager.names() == {}
