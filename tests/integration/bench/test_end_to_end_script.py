"""The script that makes the end-to-end tables, on a toy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "model"), [("gpt_oss_20b.sh", "gpt_oss_20b"), ("qwen3_30b.sh", "qwen3_30b_a3b")]
)
def test_one_step_makes_its_rows(tmp_path: Path, script: str, model: str) -> None:
    """Unseen prompt lengths; rows of a toy stand in a folder of their own in the work directory."""
    done = subprocess.run(
        [ROOT / "benchmarks" / script, "--tiny", "--only", "lengths", "--work", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "tiny" / f"{model}_tiny.json").read_text())
    rows = {row["name"]: row for row in document["rows"]}
    assert rows["200 prompt lengths: worst TTFT over its bucket's median"]["value"] >= 1
    assert rows["compilations and graph captures after READY"]["value"] == 0
    assert document["failures"] == {}


@pytest.mark.parametrize("script", ["gpt_oss_20b.sh", "qwen3_30b.sh", "families.sh"])
def test_a_python_without_the_packages_is_told(tmp_path: Path, script: str) -> None:
    """With what to do about it, instead of a traceback."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "benchmarks" / script, "--list"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "PYTHON": str(python)},
    )
    assert done.returncode == 2
    assert "make venv" in done.stderr
    assert "Traceback" not in done.stderr
