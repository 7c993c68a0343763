"""The checked-in gencode is what the protos generate now, and the protos keep buf's rules."""

import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.unit.project.repository import ROOT


def test_generated_code_is_current() -> None:
    """Regenerate and compare, file by file."""
    done = subprocess.run(
        [sys.executable, "protos/generate.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_buf_lint() -> None:
    """STANDARD rules, no exceptions."""
    buf = Path(sysconfig.get_path("scripts")) / "buf"
    done = subprocess.run([buf, "lint"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
