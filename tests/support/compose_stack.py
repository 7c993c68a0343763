"""Runs a compose file's services as plain processes: the same commands and environment, no containers.

What a container gives is stood in for: hosts become loopback, ports free ones, volumes temporary
directories; a process that ends by itself is started again, as `restart: unless-stopped` asks.
"""

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.support.compose_file import Volume, seconds
from tests.support.deployment import Deployment
from tests.support.stack import free_port
from tests.support.waiting import eventually

_RESTART_S = 0.2
_HEALTH_EVERY_S = 0.2
_STARTING_S = 120.0  # a bound for a loaded machine; the file's own start_period is longer


class ComposedService:
    """One service's process, its health check and its log."""

    def __init__(self, name: str, stack: "ComposeStack", service: Mapping[str, Any]) -> None:
        image = stack.deployment.image_of(service)
        entry: list[str] = []
        image_environment: Mapping[str, str] = {}
        if image:
            parsed, target = image
            entry = parsed.instructions(target, "ENTRYPOINT")[-1].arguments
            image_environment = parsed.environment(target)
        self.name = name
        self.log = stack.root / f"{name}.log"
        self.stop_grace_s = seconds(service["stop_grace_period"])
        self.restarts = 0
        self._is_restarted = service["restart"] == "unless-stopped"
        self._command = [stack.local(word) for word in (*entry, *service["command"])]
        self._health = [stack.local(word) for word in service["healthcheck"]["test"]]
        self._environment = {
            n: stack.local(v) for n, v in (*image_environment.items(), *service["environment"].items())
        }
        # The image's programs are this interpreter's; nothing else of our own environment goes in.
        self._environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it, and again whenever it ends by itself."""
        await self._launch()
        self._keeping = asyncio.create_task(self._keep())

    async def is_healthy(self) -> bool:
        """Run the health check's own command."""
        kind, *command = self._health
        if kind == "CMD-SHELL":
            command = ["sh", "-c", *command]
        process = await asyncio.create_subprocess_exec(
            *command,
            env=self._environment,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        return await process.wait() == 0

    async def execute(self, *command: str, **variables: str) -> tuple[int, str]:
        """`docker compose exec -e NAME ... SERVICE COMMAND`: exit code and all that it printed."""
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**self._environment, **variables},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()

    async def healthy(self) -> None:
        """Wait until it is."""
        end_s = asyncio.get_running_loop().time() + _STARTING_S
        while not await self.is_healthy():
            assert asyncio.get_running_loop().time() < end_s, f"{self.name} is not healthy:\n{self.tail()}"
            await asyncio.sleep(_HEALTH_EVERY_S)

    async def kill(self) -> None:
        """SIGKILL, as the kernel does when memory runs out; returns when the restart policy was at work."""
        assert self._process is not None
        restarts = self.restarts
        os.kill(self._process.pid, signal.SIGKILL)
        await eventually(lambda: self.restarts > restarts, 30)

    async def stop(self) -> int:
        """SIGTERM as the engine sends it; returns the exit code. Fails if the grace period is not enough."""
        if self._keeping:
            self._keeping.cancel()
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(self.stop_grace_s):
                return await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            raise AssertionError(f"{self.name} was not done in time:\n{self.tail()}") from None

    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])

    async def _launch(self) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def _keep(self) -> None:
        while self._is_restarted:
            assert self._process is not None
            await self._process.wait()
            await asyncio.sleep(_RESTART_S)
            await self._launch()
            self.restarts += 1


class ComposeStack:
    """The services of one profile. Start with `async with`."""

    def __init__(
        self, deployment: Deployment, document: Mapping[str, Any], profile: str, root: Path, model: Path
    ) -> None:
        """Plan it.

        Args:
            deployment: for the images' entry points and environment.
            document: the interpolated compose file.
            profile: services without a profile, and those of this one, are run.
            root: where volumes and logs go.
            model: the directory that stands for the model's volume.
        """
        self.deployment = deployment
        self.root = root
        chosen = {n: s for n, s in document["services"].items() if profile in s.get("profiles", [profile])}
        ports = {int(p) for s in chosen.values() for p in re.findall(r":(\d{4,5})\b", str(s))}
        self._ports = {port: free_port() for port in (*ports, 6379)}
        aliases = {a for s in chosen.values() for a in _aliases(s)}
        self._hosts = sorted({*chosen, *aliases, "localhost", "0.0.0.0"}, key=len, reverse=True)
        self._directories = {"/models/base": model}
        for volume in (Volume.parse(v) for s in chosen.values() for v in s["volumes"]):
            if volume.target not in self._directories:
                self._directories[volume.target] = root / volume.target.lstrip("/")
                self._directories[volume.target].mkdir(parents=True, exist_ok=True)
        self.services = {name: ComposedService(name, self, service) for name, service in chosen.items()}

    def local(self, text: str) -> str:
        """A word of the file as it is on this machine."""
        for path in sorted(self._directories, key=len, reverse=True):
            text = re.sub(rf"(?<![\w/]){re.escape(path)}(?=$|[/\s])", str(self._directories[path]), text)
            text = text.replace(f"file://{path}", f"file://{self._directories[path]}")
        for host in self._hosts:
            text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?=:\d)", "127.0.0.1", text)
        return re.sub(r"\b\d{4,5}\b", lambda m: str(self._ports.get(int(m[0]), m[0])), text)

    def address(self, port: int) -> str:
        """Where a published port is."""
        return f"127.0.0.1:{self._ports[port]}"

    def directory(self, target: str) -> Path:
        """What stands for a volume."""
        return self._directories[target]

    async def __aenter__(self) -> Self:
        assert shutil.which("redis-server")
        try:
            for service in self.services.values():
                await service.start()
            await self.healthy()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        for service in reversed(self.services.values()):
            await service.stop()

    async def healthy(self) -> None:
        """Wait until every health check succeeds."""
        for service in self.services.values():
            await service.healthy()


def _aliases(service: Mapping[str, Any]) -> list[str]:
    networks = service["networks"]
    return [a for n in networks.values() for a in n.get("aliases", ())] if isinstance(networks, dict) else []
