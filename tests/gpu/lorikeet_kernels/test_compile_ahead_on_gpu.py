"""Kernels compiled side by side are those that launches then find; until then nothing runs."""

from typing import Any

import torch
import triton

from lorikeet_kernels.dense.gated_activation import (
    GatedActivation,
    activate_rows,
    gated_activation_reference,
)
from lorikeet_kernels.launch.compile_ahead import compile_ahead
from lorikeet_kernels.sampling.sample_rows import sample_rows
from lorikeet_kernels.warm_up_base import warm_up_sampling

GPU = torch.device("cuda")


def test_a_compiled_launch_writes_nothing_and_a_real_one_is_right() -> None:
    """The output keeps what lay there; afterwards the same call computes."""
    # A size that no other test has: its kernel is not compiled yet.
    inner, activation = 728, GatedActivation(alpha=1.5, limit=3.0, up_offset=0.5)
    gate_up = torch.randn(5, 2 * inner, dtype=torch.bfloat16, device=GPU)
    out = torch.full((5, inner), 7.0, dtype=torch.bfloat16, device=GPU)

    def launch() -> None:
        activate_rows(gate_up, out, activation, "concatenated")

    assert compile_ahead(launch, num_threads=2) == 1
    assert bool((out == 7).all())
    assert compile_ahead(launch, num_threads=2) == 0
    assert bool((out == 7).all())
    launch()
    expected = gated_activation_reference(gate_up.cpu(), activation)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-2, atol=1e-2)


def test_nothing_is_left_to_compile() -> None:
    """A vocabulary's kernels of sampling, compiled on four threads, then launched."""
    vocab = 5003
    compile_ahead(lambda: warm_up_sampling(vocab, torch.bfloat16, 20), num_threads=4)
    compiled: list[str] = []
    runtime: Any = triton.knobs.runtime  # pyright: ignore[reportAttributeAccessIssue]
    before = runtime.jit_post_compile_hook

    def hook(**given: object) -> None:
        compiled.append(str(given.get("repr")))

    runtime.jit_post_compile_hook = hook
    try:
        warm_up_sampling(vocab, torch.bfloat16, 20)
        logits = torch.randn(3, vocab, device=GPU)
        zeros = torch.zeros(3, dtype=torch.int64, device=GPU)
        temperature = torch.zeros(3, device=GPU)
        tokens = sample_rows(
            logits, temperature, temperature + 1, zeros, zeros, all_greedy=True, any_top_p=False
        )
        assert torch.equal(tokens, logits.argmax(dim=1))
        assert compiled == []
    finally:
        runtime.jit_post_compile_hook = before
