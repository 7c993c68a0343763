"""The composed stack works: its commands, environment and health checks, run as plain processes."""

import asyncio
import json
import shutil
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import Result
from typer.testing import CliRunner

from lorikeet_admin.app import app
from lorikeet_bench import rigs
from tests.support.certificates import write_certificates
from tests.support.compose_stack import ComposeStack
from tests.support.deployment import TLS, VARIABLES, Deployment

pytestmark = [
    pytest.mark.skipif(
        shutil.which("redis-server") is None, reason="redis-server is not installed (Debian: redis-server)"
    ),
    pytest.mark.timeout(600),
]


class Command:
    """The `lorikeet` command against a stack."""

    def __init__(self, stack: ComposeStack, environment: Mapping[str, str] | None = None) -> None:
        self._stack = stack
        self._environment = dict(environment or {})

    async def run(self, *arguments: str) -> list[dict[str, Any]]:
        """Its documents; again while a service is away or has not heard of the news."""
        end_s = time.monotonic() + 60
        while True:
            done = await asyncio.to_thread(self.once, *arguments)
            if done.exit_code == 0:
                return [json.loads(line) for line in done.stdout.splitlines()]
            assert done.exit_code in {3, 4, 5, 6}, done.output
            assert time.monotonic() < end_s, done.output
            await asyncio.sleep(0.2)

    async def tokens(self, adapter: str) -> list[int]:
        """Greedy tokens of one request."""
        request = (
            "generate",
            "--prompt",
            "!",
            "--adapter",
            adapter,
            "--max-tokens",
            "4",
            "--temperature",
            "0",
        )
        documents = await self.run(*request)
        return [token["id"] for document in documents for token in document.get("tokens", ())]

    def once(self, *arguments: str) -> Result:
        """One try, in this process: starting another for each would take longer than all else."""
        token = (self._stack.directory("/var/lib/lorikeet/manager") / "bootstrap-token").read_text().strip()
        environment = {
            "LORIKEET_INFERENCE": self._stack.address(50051),
            "LORIKEET_MANAGER": self._stack.address(50052),
            "LORIKEET_TOKEN": token,
            **self._environment,
        }
        return CliRunner().invoke(app, [*arguments, "--json"], env=environment)


async def push(command: Command, root: Path, mark: int) -> None:
    """Push a watermark and get it back; the node knows tokens once the manager has met it."""
    await command.run("model", "show")
    directory = rigs.write_moe_watermark(root / f"w{mark}", mark)
    (pushed,) = await command.run("adapters", "push", str(directory), "--name", f"demo/w{mark}")
    assert pushed["created"]
    assert await command.tokens(f"demo/w{mark}") == [mark] * 4


async def check_command_inside(stack: ComposeStack) -> None:
    """`lorikeet` beside the manager needs nothing but the token; without one it is refused."""
    manager = stack.services["adapter-manager"]
    token = (stack.directory("/var/lib/lorikeet/manager") / "bootstrap-token").read_text().strip()
    for arguments in (("model", "show"), ("adapters", "list")):
        code, output = await manager.execute("lorikeet", *arguments, LORIKEET_TOKEN=token)
        assert code == 0, output
        code, output = await manager.execute("lorikeet", *arguments)
        assert code == 5, output


def check_inside(stack: ComposeStack) -> None:
    """Redis asks for the password and writes before it answers; both services show metrics."""
    host, _, port = stack.address(6379).partition(":")
    with redis.Redis(host, int(port)) as stranger, pytest.raises(redis.exceptions.AuthenticationError):
        stranger.ping()
    with redis.Redis(host, int(port), password=VARIABLES["LORIKEET_REDIS_PASSWORD"]) as known:
        settings: Any = known.config_get("append*")
        assert (settings["appendonly"], settings["appendfsync"]) == ("yes", "always")
        assert known.dbsize()  # the registry is here, not in an embedded store
    for metrics_port in (9401, 9402):
        with urllib.request.urlopen(f"http://{stack.address(metrics_port)}/metrics", timeout=30) as reply:
            assert b"rpc_server_calls" in reply.read()


@pytest.mark.long
async def test_up_push_kill_each_and_stop(tmp_path: Path) -> None:
    """Healthy, served, back after a kill -9 of each with what was acknowledged, and stopped in time."""
    deployment = Deployment.read()
    base = rigs.write_copy_base(tmp_path / "base")
    stack = ComposeStack(deployment, deployment.compose(), "cpu", tmp_path / "stack", base)
    assert set(stack.services) == {"redis", "adapter-manager", "inference-service"}
    async with stack:
        command = Command(stack)
        await push(command, tmp_path, 10)
        await asyncio.to_thread(check_inside, stack)
        await check_command_inside(stack)
        for mark, (name, victim) in enumerate(stack.services.items(), 11):
            await victim.kill()
            assert victim.restarts == 1, name
            await stack.healthy()
            for earlier in range(10, mark):
                assert await command.tokens(f"demo/w{earlier}") == [earlier] * 4, name
            await push(command, tmp_path, mark)
            (listed,) = await command.run("adapters", "list")
            assert len(listed["adapters"]) == mark - 9, name
        for service in reversed(stack.services.values()):
            assert await service.stop() == 0, service.tail()
            assert not await service.is_healthy()


@pytest.mark.long
async def test_tls(tmp_path: Path) -> None:
    """With deploy/compose.tls.yaml the same commands and health checks speak TLS; plain text is refused."""
    deployment = Deployment.read()
    base = rigs.write_copy_base(tmp_path / "base")
    stack = ComposeStack(deployment, deployment.compose(TLS), "cpu", tmp_path / "stack", base)
    write_certificates(stack.directory("/tls"))
    async with stack:
        await push(
            Command(stack, {"LORIKEET_TLS_CA_FILE": str(stack.directory("/tls") / "ca.pem")}), tmp_path, 10
        )
        assert Command(stack).once("adapters", "list").exit_code == 4
        await check_command_inside(stack)
