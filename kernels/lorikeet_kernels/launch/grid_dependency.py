"""Programmatic dependent launch in Gluon kernels, which Triton 3.6 offers to Triton kernels only."""

# A Gluon kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def wait_for_grid():
    """Block until the launch before has completed and its writes can be read; nothing without launch_pdl."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def launch_next_grid():
    """Let the launch after start, if it has launch_pdl, once all programs are here or gone."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
