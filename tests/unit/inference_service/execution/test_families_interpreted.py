"""Families by the kernels that a GPU would launch, in Triton's interpreter, beside golden outputs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Each takes about 45 s of one core; the GPU suite has all families. Llama 4 has what no other has: chunks,
# norms behind the rotation, temperature, experts' inputs weighted; DeepSeek's latents and gpt-oss's sinks and
# interleaved experts are the other paths of their own. MXFP4's kernels are Gluon, which is not interpreted.
FAMILIES = ("llama4", "deepseek_v3", "gpt_oss")


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_base_and_adapters_in_one_batch(name: str) -> None:
    """See interpreted_family.py; no op has a reference alone."""
    script = Path(__file__).with_name("interpreted_family.py")
    root = Path(__file__).parents[4]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(root), os.environ.get("PYTHONPATH", ""))),
    }
    done = subprocess.run(
        [sys.executable, str(script), name, "2", "2"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
