"""The FP8 ops' Triton kernels under the interpreter, which needs processes of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = (
    ("interpreted_fp8.py", "quantize_rows"),
    ("interpreted_fp8.py", "channels"),
    ("interpreted_fp8.py", "ragged_blocks"),
    ("interpreted_fp8.py", "whole_blocks"),
    ("interpreted_fp8.py", "mixed_experts"),
    pytest.param("interpreted_fp8.py", "gemm_lora", marks=pytest.mark.long),
    ("interpreted_fp8.py", "dense"),
    pytest.param("interpreted_fp8.py", "few_rows", marks=pytest.mark.long),  # a minute and a half
    ("interpreted_fp8_ranged.py", "staying"),
    ("interpreted_fp8_ranged.py", "edges"),
    pytest.param("interpreted_fp8_ranged.py", "many", marks=pytest.mark.long),
    pytest.param("interpreted_fp8_ranged.py", "idle", marks=pytest.mark.long),
)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_kernels_match_references_under_the_interpreter(name: str, case: str) -> None:
    """See the files for what a case covers."""
    script = Path(__file__).with_name(name)
    stand_ins = (str(script.parent.parent / room) for room in ("lora", "attention"))
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), *stand_ins)))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(script), case], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
