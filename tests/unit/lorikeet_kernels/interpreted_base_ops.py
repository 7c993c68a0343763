"""Cases of the base ops for the Triton interpreter, run by test_base_ops_interpreted.py, a process for each.

TRITON_INTERPRET is read when a kernel is defined, so it must be set before the first import. float32 and
float16 only: the interpreter multiplies bfloat16 as bit patterns.
"""

import sys
from collections.abc import Callable

import torch

from lorikeet_kernels.expert_blocks import cut_blocks, expert_blocks_reference


def check_expert_blocks() -> None:
    """One and several parts, experts without pairs, all pairs on one expert, experts not a power of two."""
    generator = torch.Generator().manual_seed(0)
    for tokens, top_k, experts, rows in ((1, 4, 32, 8), (7, 2, 5, 8), (300, 4, 13, 16), (150, 8, 128, 64)):
        ids = torch.rand(tokens, experts, generator=generator).topk(top_k, dim=1).indices.to(torch.int32)
        for chosen in (ids, torch.zeros_like(ids), ids.sort(dim=0).values.contiguous()):
            expected = expert_blocks_reference(chosen, experts, rows)
            got = cut_blocks(chosen, experts, rows)
            assert torch.equal(got.order, expected.order)
            assert torch.equal(got.blocks[:, :3], expected.blocks[:, :3])


CASES: dict[str, Callable[[], None]] = {"expert_blocks": check_expert_blocks}


if __name__ == "__main__":
    CASES[sys.argv[1]]()
