"""The LoRA kernels under Triton's interpreter, which needs a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "name",
    [
        "interpreted_register_segments.py",
        pytest.param("interpreted_lora.py", marks=pytest.mark.long),  # each a minute or most of one
        pytest.param("interpreted_few_rows_lora.py", marks=pytest.mark.long),
    ],
)
def test_kernels_match_references_under_the_interpreter(name: str) -> None:
    """Decode, grouped, dense and embedding kernels agree with the references in float32 and float16."""
    script = Path(__file__).with_name(name)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
