"""Paged attention's Triton kernels under the interpreter, which needs processes of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = ("attention_inputs", "paged_attention", pytest.param("vanishing_sinks", marks=pytest.mark.long))


@pytest.mark.parametrize("case", CASES)
def test_kernels_match_references_under_the_interpreter(case: str) -> None:
    """See interpreted_paged.py for what a case covers."""
    script = Path(__file__).with_name("interpreted_paged.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), case], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
