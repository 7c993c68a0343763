"""Latent attention's kernels under the interpreter, which needs processes of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = (
    pytest.param("interpreted_latent.py", "latent_attention", marks=pytest.mark.long),  # half a minute
    ("interpreted_latent.py", "latent_inputs"),
    ("interpreted_latent.py", "prompt_attention"),
    ("interpreted_latent_ring.py", "small_pages"),
    ("interpreted_latent_ring.py", "large_pages"),
    ("interpreted_latent_ring.py", "padding"),
)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_kernels_match_references_under_the_interpreter(name: str, case: str) -> None:
    """See the files for what a case covers."""
    script = Path(__file__).with_name(name)
    stand_ins = str(script.parent.parent / "lora")
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), stand_ins)))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(script), case], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
