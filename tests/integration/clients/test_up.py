"""`lorikeet up` with the real services: ready line, a session through the CLI, and every way to end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
MODEL = FIXTURES / "models" / "qwen3_moe"
ADAPTER = FIXTURES / "adapters" / "qwen3_moe" / "attn-r8"


def command(*arguments: str) -> list[str]:
    """The CLI by this interpreter."""
    return [sys.executable, "-m", "lorikeet_admin", *arguments]


class Up:
    """A running `lorikeet up` and what its ready line said."""

    def __init__(self, process: subprocess.Popen[str], ready: dict[str, Any]) -> None:
        self.process, self.ready = process, ready
        self.env = {
            **os.environ,
            "LORIKEET_INFERENCE": ready["inference"],
            "LORIKEET_MANAGER": ready["manager"],
            "LORIKEET_TOKEN": ready["token"],
        }

    def cli(self, *arguments: str) -> Any:
        """Run another command with --json; returns its documents."""
        done = subprocess.run(
            command(*arguments, "--json"),
            env=self.env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def wait(self) -> tuple[int, str, str]:
        """Exit code, the rest of stdout, stderr."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@contextmanager
def up(data_dir: Path) -> Generator[Up]:
    """Start and wait for the ready line; kill what is left afterwards."""
    process = subprocess.Popen(
        command(
            *("up", "--model-dir", str(MODEL), "--data-dir", str(data_dir), "--device", "cpu", "--json"),
            *("--inference-port", "0", "--manager-port", "0"),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith('{"inference"'), line + process.communicate(timeout=60)[1]
        yield Up(process, json.loads(line))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie whose parent is gone does not count)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_ended(pids: list[int], timeout_s: float = 20) -> None:
    """None of them runs any more, soon."""
    end = time.monotonic() + timeout_s
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < end, f"still running: {left}"
        time.sleep(0.05)


def test_a_session_and_a_clean_stop(tmp_path: Path) -> None:
    """Push, list, generate and residency by the CLI; SIGTERM ends with 0; the data is there the next time."""
    with up(tmp_path) as stack:
        (pushed,) = stack.cli("adapters", "push", str(ADAPTER), "--name", "demo/a", "--alias", "prod")
        assert pushed["created"]
        (again,) = stack.cli("adapters", "push", str(ADAPTER), "--name", "demo/a")
        assert not again["created"]
        *_, last = stack.cli("generate", "--prompt", "hello", "--adapter", "demo/a@prod", "--max-tokens", "3")
        assert last["finish"]["adapter"]["digest"] == pushed["revision"]["digest"]
        (residency,) = stack.cli("residency")
        assert residency["placements"][0]["state"] == "active"
        second = subprocess.run(
            command("up", "--model-dir", str(MODEL), "--data-dir", str(tmp_path), "--json"),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert second.returncode == 1
        assert "in use by another `lorikeet up`" in second.stderr
        stack.process.send_signal(signal.SIGTERM)
        code, out, err = stack.wait()
        assert (code, out) == (0, ""), err
        assert_ended(list(stack.ready["pids"].values()), timeout_s=0)
    with up(tmp_path) as stack:
        (listed,) = stack.cli("adapters", "list")
        assert [adapter["current_digest"] for adapter in listed["adapters"]] == [pushed["revision"]["digest"]]
        stack.process.send_signal(signal.SIGINT)
        assert stack.wait()[0] == 0


@pytest.mark.long
@pytest.mark.parametrize("victim", ["inference", "manager"])
def test_a_service_that_dies_ends_it_with_an_error(tmp_path: Path, victim: str) -> None:
    """The message names the service and its log; the other one is stopped."""
    with up(tmp_path) as stack:
        os.kill(stack.ready["pids"][victim], signal.SIGKILL)
        code, out, err = stack.wait()
        assert code == 1
        assert f"{victim} was ended by signal 9; the end of {tmp_path}" in err
        assert json.loads(out)["error"]["exit_code"] == 1
        assert_ended(list(stack.ready["pids"].values()))


@pytest.mark.long
def test_a_killed_stack_leaves_nothing_behind(tmp_path: Path) -> None:
    """SIGKILL of `lorikeet up` itself ends its services too."""
    with up(tmp_path) as stack:
        stack.process.kill()
        assert_ended(list(stack.ready["pids"].values()), timeout_s=40)


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    """The service's last words are shown, and the manager is not left running."""
    (tmp_path / "model").mkdir()
    done = subprocess.run(
        command(
            *("up", "--model-dir", str(tmp_path / "model"), "--data-dir", str(tmp_path / "data")),
            *("--inference-port", "0", "--manager-port", "0"),
        ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "inference ended with exit code" in done.stderr
    assert "save_pretrained" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """Said at once, with what to do, before anything is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            command("up", "--model-dir", str(MODEL), "--data-dir", str(tmp_path), "--inference-port", port),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert f"port {port} is taken" in done.stderr
    assert "--inference-port" in done.stderr
