"""Every family by the kernels that a GPU would launch, in Triton's interpreter, beside golden outputs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.golden import GOLDEN_MODELS

# Llama 4 has what no other has: chunks, norms behind the rotation, temperature, experts' inputs weighted.
ALWAYS = "llama4"
# Packed experts have kernels in Gluon, which the interpreter does not run.
PACKED = ("gpt_oss_mxfp4",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(model.name, marks=() if model.name == ALWAYS else pytest.mark.long)
        for model in GOLDEN_MODELS
        if model.name not in PACKED
    ],
)
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
    sizes = ["2", "2"] if name == ALWAYS else ["4", "3"]
    done = subprocess.run(
        [sys.executable, str(script), name, *sizes],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
