"""The embedded server's life: durable configuration, no second one, no orphan, stale files, long paths."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from adapter_manager.domain.errors import RegistryUnavailableError
from adapter_manager.domain.tenant import Tenant
from adapter_manager.infra.data_directory import DataDirectory, DataDirectoryInUseError
from adapter_manager.infra.redis import embedded
from adapter_manager.infra.redis.connection import RedisConnection, RedisOptions
from adapter_manager.infra.redis.embedded import EmbeddedValkey
from adapter_manager.infra.redis.registry import RedisRegistry
from adapter_manager.ports import create
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]


async def test_every_write_is_synced_and_nothing_listens_on_a_port(server: EmbeddedValkey) -> None:
    """The configuration that durability rests on."""
    connection = RedisConnection(RedisOptions(server.url))
    text = await connection.client.config_get("append*", "port", "maxmemory-policy")
    assert (text["appendonly"], text["appendfsync"], text["port"]) == ("yes", "always", "0")
    assert text["maxmemory-policy"] == "noeviction"
    assert Path(server.url.removeprefix("unix://")).stat().st_mode & 0o077 == 0
    await connection.close()


async def test_data_survives_an_orderly_stop(tmp_path: Path) -> None:
    """Stop removes the socket, start replays the log."""
    for number in range(2):
        server = EmbeddedValkey(tmp_path)
        await server.start()
        registry = RedisRegistry(RedisConnection(RedisOptions(server.url)))
        if number == 0:
            await registry.commit([create(Tenant("t", 1.0))])
        else:
            assert await registry.tenant("t")
        await registry.close()
        await server.stop()
        assert not (tmp_path / "valkey.sock").exists()
        assert server.pid is None


async def test_a_second_server_on_the_same_files_is_refused(
    tmp_path: Path, server: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would corrupt the log; the first goes on."""
    monkeypatch.setattr(embedded, "_STOP_TIMEOUT_S", 0.2)
    second = EmbeddedValkey(tmp_path / "valkey")
    with pytest.raises(RegistryUnavailableError, match="another store is running"):
        await second.start()
    assert server.pid


async def test_stale_sockets_and_long_paths_are_no_obstacle(tmp_path: Path) -> None:
    """A socket file of a killed server, and a directory too deep for a socket's name."""
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    for directory in (tmp_path / "short", deep):
        directory.mkdir(exist_ok=True)
        (directory / "valkey.sock").write_text("stale")
        server = EmbeddedValkey(directory)
        await server.start()
        connection = RedisConnection(RedisOptions(server.url))
        assert await connection.client.ping()
        await connection.close()
        await server.stop()


@pytest.mark.parametrize("is_hung", [False, True])
async def test_the_server_ends_with_its_manager_and_the_next_start_waits_for_it(
    tmp_path: Path, is_hung: bool
) -> None:
    """Kill -9 of the owner: no orphan keeps the files, not even a stopped one; acknowledged data is there."""
    script = f"""
import asyncio, pathlib
from adapter_manager.domain.tenant import Tenant
from adapter_manager.infra.redis.connection import RedisConnection, RedisOptions
from adapter_manager.infra.redis.embedded import EmbeddedValkey
from adapter_manager.infra.redis.registry import RedisRegistry
from adapter_manager.ports import create
async def main():
    server = EmbeddedValkey(pathlib.Path({str(tmp_path)!r}))
    await server.start()
    await RedisRegistry(RedisConnection(RedisOptions(server.url))).commit([create(Tenant("t", 1.0))])
    print("pid", server.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert owner.stdout
    lines = [line async for line in _until_pid(owner.stdout)]
    pid = int(lines[-1].split()[1])
    if is_hung:
        os.kill(pid, signal.SIGSTOP)
    owner.kill()
    await owner.wait()
    server = EmbeddedValkey(tmp_path)
    await server.start()
    registry = RedisRegistry(RedisConnection(RedisOptions(server.url)))
    assert await registry.tenant("t")
    await eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
    await registry.close()
    await server.stop()


async def test_a_server_that_ends_by_itself_is_started_again(server: EmbeddedValkey) -> None:
    """Killed from outside, twice."""
    for _ in range(2):
        pid = server.pid
        assert pid
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda pid=pid: server.pid not in (None, pid), 10)


async def test_a_server_that_hangs_is_started_again(
    server: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, it answers nobody: it is killed, and what it acknowledged is there afterwards."""
    connection = RedisConnection(RedisOptions(server.url))
    registry = RedisRegistry(connection)
    await registry.commit([create(Tenant("t", 1.0))])
    pid = server.pid
    assert pid
    monkeypatch.setattr(embedded, "_ANSWER_S", 0.2)
    os.kill(pid, signal.SIGSTOP)
    await eventually(lambda: server.pid not in (None, pid), 60)
    monkeypatch.undo()
    async with asyncio.timeout(60):
        while not await _has_tenant(registry):  # noqa: ASYNC110 (another process says when)
            await asyncio.sleep(0.05)
    await registry.close()


def test_a_data_directory_has_one_manager_a_lasting_id_and_a_private_token(tmp_path: Path) -> None:
    """The second manager is told which process is in the way."""
    directory = DataDirectory(tmp_path / "data")
    with directory.lock():
        with pytest.raises(DataDirectoryInUseError, match=str(os.getpid())):
            directory.lock()
        assert directory.manager_id() == directory.manager_id()
        token = directory.bootstrap_token()
        assert directory.bootstrap_token() == token
        path = directory.root / "bootstrap-token"
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.read_text().strip() == token.token
    directory.lock().close()


async def _has_tenant(registry: RedisRegistry) -> bool:
    try:
        return await registry.tenant("t") is not None
    except RegistryUnavailableError:
        return False


async def _until_pid(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of a process up to the one that begins with "pid "."""
    async for line in stream:
        yield line.decode()
        if line.startswith(b"pid "):
            return
