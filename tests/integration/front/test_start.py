"""A service that cannot start says why in one line and exits with a code that scripts can tell apart."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.node import write_model_dir


def start(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the service with a model directory that has no model in it."""
    model = str(tmp_path / "model")
    command = [sys.executable, "-m", "inference_service", "--model-dir", model, "--listen", "127.0.0.1:0"]
    return subprocess.run(
        [*command, "--data-dir", str(tmp_path / "data"), *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def _bad_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% if %}")


def _bad_generation_config(model: Path) -> None:
    (model / "generation_config.json").write_text('{"temperature": "hot"}')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_no_tokenizer, "save_pretrained"),
        (_bad_template, "chat template"),
        (_bad_generation_config, "--generation-config none"),
    ],
)
def test_broken_model_directories(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    """Exit code 1, one log line with what to mend, no traceback; before any engine is started."""
    damage(write_model_dir(tmp_path / "model"))
    result = start(tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    event = json.loads(line)
    assert event["event"] == "server.start_failed"
    assert words in event["error"]


def test_what_the_backend_cannot_be_built_of(tmp_path: Path) -> None:
    """A config.json that is no model's: the engine says what is wrong, and no traceback hides it."""
    write_model_dir(tmp_path / "model")
    result = start(tmp_path, "--device", "cpu")
    assert (result.returncode, result.stdout) == (1, "")
    events = [json.loads(line) for line in result.stderr.splitlines()]
    assert [event["event"] for event in events] == ["engine.start_failed", "server.start_failed"]
    assert "config.json" in events[0]["error"]
    assert events[0]["error"] in events[1]["error"]
    assert "Traceback" not in result.stderr


def test_plain_text_beyond_loopback(tmp_path: Path) -> None:
    """Refused at once, with both ways out."""
    write_model_dir(tmp_path / "model")
    result = start(tmp_path, "--listen", "0.0.0.0:0")
    assert result.returncode == 1
    assert "--insecure-listen" in result.stderr


def test_wrong_settings(tmp_path: Path) -> None:
    """Exit code 2 and the flag's name."""
    write_model_dir(tmp_path / "model")
    result = start(tmp_path, "--max-rank", "none")
    assert result.returncode == 2
    assert "--max-rank (INFERENCE_MAX_RANK)" in result.stderr
    assert "Traceback" not in result.stderr
