"""One life of the engine process, as its parent sees it: spawn, wait until ready, talk, end."""

import asyncio
import itertools
import os
import sys
import time
import uuid

import msgspec
import structlog
import zmq

from inference_service.domain.engine import EngineInfo
from inference_service.domain.errors import EngineDeadError
from inference_service.engine.channel import Endpoints, FrontSide
from inference_service.engine.config import EngineConfig
from inference_service.engine.launch import Launch
from inference_service.engine.messages import EngineFailed, FromEngine, GetStatus, Ready, Shutdown, ToEngine
from inference_service.engine.socket_directory import SocketDirectory, sweep_socket_directories

_END_GRACE_S = 5.0
# A silent engine is asked this often for a sign of life before it counts as stalled.
_NUM_PINGS = 4
_PING = GetStatus(0)  # the reply to call 0 goes to nobody

log = structlog.get_logger()


class EngineProcess:
    """A running, ready engine process. Made by `start` only; every life has an `instance_id` of its own."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        side: FrontSide,
        directory: SocketDirectory,
        stall_timeout_s: float,
    ) -> None:
        self.instance_id = uuid.uuid4().hex
        self.info: EngineInfo | None = None
        self._process = process
        self._side = side
        self._directory = directory
        self._stall_timeout_s = stall_timeout_s
        self._exit = asyncio.ensure_future(process.wait())
        self._last_words = ""

    @classmethod
    async def start(cls, config: EngineConfig) -> "EngineProcess":
        """Spawn a process and wait until its model is loaded.

        Raises:
            EngineDeadError: it could not be spawned, it ended before it was ready, or
                `config.start_timeout_s` passed.
        """
        try:
            engine = cls(*await _spawn(config), config.stall_timeout_s)
        except (OSError, zmq.ZMQError) as error:
            raise EngineDeadError(f"the engine process could not be spawned: {error}") from error
        try:
            async with asyncio.timeout(config.start_timeout_s):
                await engine._await_ready()
        except TimeoutError as error:
            await engine.end()
            raise EngineDeadError(f"the engine was not ready within {config.start_timeout_s} s") from error
        except BaseException:
            await engine.end()
            raise
        return engine

    def send(self, message: ToEngine) -> None:
        """Queue a message for the engine; never blocks."""
        self._side.send(message)

    async def receive(self) -> FromEngine:
        """The engine's next message.

        Raises:
            EngineDeadError: the process ended, or stalled and was killed for it.
        """
        receiving = asyncio.ensure_future(self._side.receive())
        try:
            await self._wait_for(receiving)
            if receiving.done():
                message = receiving.result()
                if not isinstance(message, EngineFailed):
                    return message
                self._last_words = message.message
                await self._exit_or_kill(_END_GRACE_S)
        finally:
            receiving.cancel()
        words = self._last_words or f"exit status {self._exit.result()}"
        raise EngineDeadError(f"the engine process ended: {words}", retry_after_s=5.0)

    async def end(self) -> None:
        """Ask the process to go, kill it if it does not, and clean up. Safe to call twice."""
        if not self._exit.done():
            self._side.send(Shutdown())
        await self._exit_or_kill(_END_GRACE_S if self.info else 0)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._side.close()
        self._directory.remove()

    async def _wait_for(self, receiving: "asyncio.Future[FromEngine]") -> None:
        """Until a message is there or the process has ended; a process that is silent too long is killed."""
        # Turns are counted, not the clock: while we ourselves stood still the engine may well have answered.
        for num_quiet in itertools.count(1):
            done, _ = await asyncio.wait(
                {receiving, self._exit},
                timeout=self._stall_timeout_s / _NUM_PINGS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if done:
                return
            if self.info is None:  # `start` bounds how long the model may load
                continue
            if num_quiet > _NUM_PINGS:
                break
            self.send(_PING)
        self._last_words = f"it gave no sign of life for {self._stall_timeout_s:g} s and was killed"
        log.error("engine.stalled", instance_id=self.instance_id, stall_timeout_s=self._stall_timeout_s)
        await self._exit_or_kill(0)

    async def _exit_or_kill(self, grace_s: float) -> None:
        """Until the process is gone; a thread that hangs may keep it from ending by itself."""
        await asyncio.wait({self._exit}, timeout=grace_s)
        if not self._exit.done():
            self._process.kill()
        await self._exit

    async def _await_ready(self) -> None:
        while self.info is None:
            message = await self.receive()
            if isinstance(message, Ready):
                self.info = message.info


async def _spawn(config: EngineConfig) -> tuple[asyncio.subprocess.Process, FrontSide, SocketDirectory]:
    sweep_socket_directories()
    directory = SocketDirectory()
    side: FrontSide | None = None
    try:
        endpoints = Endpoints(f"ipc://{directory.path}/in", f"ipc://{directory.path}/out")
        launch = Launch(config, endpoints, os.getpid(), tuple(sys.path), time.monotonic())
        side = FrontSide(endpoints)
        # Standard input stays open for our whole life: its end tells the engine that we are gone.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "inference_service.engine.engine_process",
            msgspec.json.encode(launch).decode(),
            stdin=asyncio.subprocess.PIPE,
        )
    except BaseException:
        if side is not None:
            side.close()
        directory.remove()
        raise
    return process, side, directory
