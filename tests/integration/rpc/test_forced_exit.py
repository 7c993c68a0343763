"""A service that hangs on its way out is ended by force, and says what was in the way."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

_SERVICE = """
import asyncio, sys
from types import SimpleNamespace
from lorikeet_rpc import server as module
from lorikeet_rpc.service_program import run_service

async def deaf():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

async def serve(settings):
    if sys.argv[1] == "deaf":
        kept = asyncio.create_task(deaf(), name="deaf")
    module._EXIT_S = float(sys.argv[2])
    server = module.RpcServer("unix:" + sys.argv[3], tls=None, interceptors=(), service_names=())
    await server.start()
    # Runs after the signal handlers are there.
    asyncio.get_running_loop().call_soon(lambda: print("serving", flush=True))
    await server.serve_until_signal(lambda: asyncio.sleep(0), 0.1)

sys.exit(run_service("s", lambda _: SimpleNamespace(log_format="json", log_level="info"), serve))
"""


async def _ended(tmp_path: Path, kind: str, exit_s: float) -> tuple[int | None, dict[str, dict[str, object]]]:
    """Exit code and last log line of each event, after SIGTERM."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SERVICE, kind, str(exit_s), str(tmp_path / "s"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout
        assert await process.stdout.readline() == b"serving\n"
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    lines = [json.loads(line) for line in errors.splitlines()]
    return process.returncode, {line["event"]: line for line in lines}


async def test_a_task_that_never_ends_costs_a_limited_time(tmp_path: Path) -> None:
    """Code 1, and its name in the log, after everything else went in order."""
    code, found = await _ended(tmp_path, "deaf", 1.0)
    assert code == 1
    assert "server.stopped" in found
    tasks = found["server.exit_forced"]["tasks"]
    assert isinstance(tasks, list)
    assert "deaf" in tasks


async def test_nothing_is_forced_where_all_ends(tmp_path: Path) -> None:
    """Code 0."""
    code, found = await _ended(tmp_path, "willing", 60.0)
    assert code == 0
    assert list(found) == ["server.draining", "server.stopped"]
