"""The base ops' Triton kernels under the interpreter, which needs processes of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = (
    "row_ops",
    "sampling",
    pytest.param("top_k_bounds", marks=pytest.mark.long),  # each most of a minute
    pytest.param("all_cuts", marks=pytest.mark.long),
    "penalties",
    "token_bitmask",
    "pending_tokens",
    "expert_blocks",
    "expert_gemm",
    "moe_sum",
)


@pytest.mark.parametrize("case", CASES)
def test_kernels_match_references_under_the_interpreter(case: str) -> None:
    """See interpreted_base_ops.py for what a case covers."""
    script = Path(__file__).with_name("interpreted_base_ops.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), case], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
