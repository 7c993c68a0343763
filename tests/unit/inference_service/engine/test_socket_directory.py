"""Directories of engines' sockets: private, and swept once their owner is dead."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from inference_service.engine.socket_directory import SocketDirectory, sweep_socket_directories

_OWNER = """
import sys, time
from inference_service.engine.socket_directory import SocketDirectory
held = SocketDirectory()
print(held.path, flush=True)
time.sleep(60)
"""


def test_only_dead_owners_lose_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process's directory goes at the next sweep; a living one's, and anybody else's, stay."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = SocketDirectory()
    stranger = tmp_path / "lorikeet-engine-unfinished"
    stranger.mkdir()
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert owner.stdout is not None
    with owner.stdout:
        theirs = Path(owner.stdout.readline().strip())
        assert sweep_socket_directories() == 0
        assert theirs.is_dir()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert sweep_socket_directories() == 1
    assert not theirs.exists()
    assert mine.path.is_dir()
    assert stranger.is_dir()
    assert mine.path.stat().st_mode & 0o077 == 0
    mine.remove()
    mine.remove()
    assert not mine.path.exists()
