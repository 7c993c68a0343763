"""Down and the top-k sum in one launch by ranges: the bits of two launches, whatever the batch."""

from typing import Any

import pytest
import torch

from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.dense.gated_activation import GatedActivation
from lorikeet_kernels.dense.quantize_rows import quantize_rows
from lorikeet_kernels.experts import moe_experts as experts_room
from lorikeet_kernels.experts.expert_blocks import ExpertBlocks, expert_blocks
from lorikeet_kernels.experts.fp8_gemm import fp8_gemm
from lorikeet_kernels.experts.fp8_ranged_down import BLOCK_ROWS, empty_marks, fp8_ranged_down
from lorikeet_kernels.experts.moe_experts import ExpertProjection, moe_experts
from lorikeet_kernels.experts.moe_sum import SharedRows, sum_pairs
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles, MoeTiles, RangedTiles
from tests.support.fp8_matrices import GROUPS, fp8_matrices

GPU = torch.device("cuda")
BF16 = torch.bfloat16
WHOLE = ExpertTiles("specialized", BLOCK_ROWS, 128, 128, 4, 16)
RANGED = (
    RangedTiles(128, 6, 1, 2),
    RangedTiles(128, 6, 2, 4),
    RangedTiles(128, 3, 3, 1000),
    RangedTiles(256, 6, 1, 3),
    RangedTiles(512, 6, 1, 3),
)


def two_launches(
    act: torch.Tensor,
    weight: Fp8Weight,
    blocks: ExpertBlocks,
    routed: torch.Tensor,
    shared: SharedRows | None,
) -> torch.Tensor:
    """[T, H] by the GEMM that stores all pairs, and the sum of these."""
    pairs = act.new_full((*routed.shape, weight.shape[1]), float("nan"))
    fp8_gemm(quantize_rows(act, GROUPS), weight, blocks, pairs, WHOLE, topk_weights=routed)
    return sum_pairs(pairs, act.new_full((len(routed), weight.shape[1]), float("nan")), shared=shared)


CASES = (
    *((tiles, 256, 8, BF16) for tiles in RANGED),
    (RANGED[1], 256, 8, torch.float16),
    (RANGED[1], 128, 4, BF16),
    (RANGED[3], 256, 2, BF16),
)


@pytest.mark.parametrize(("tiles", "inner", "top_k", "dtype"), CASES, ids=str)
def test_has_the_bits_of_two_launches(tiles: RangedTiles, inner: int, top_k: int, dtype: torch.dtype) -> None:
    """Experts with no pairs and with all; up to two blocks a program, and of top 8 more than two.

    Ten times over buffers that hold other results.
    """
    experts, hidden = 40, 3072
    weight = fp8_matrices((experts, hidden, inner), "block", (hidden,))
    for num_tokens in (1, 257, 2900, 7001):
        routed = torch.rand(num_tokens, top_k, device=GPU)
        uniform = torch.rand(num_tokens, experts, device=GPU).topk(top_k, dim=1).indices.to(torch.int32)
        same = torch.arange(top_k, device=GPU, dtype=torch.int32).expand(num_tokens, -1).contiguous()
        shared = SharedRows(torch.randn(num_tokens, hidden, device=GPU).to(dtype))
        for ids in (uniform, uniform % (2 * top_k), same):
            blocks = expert_blocks(ids, experts, BLOCK_ROWS)
            for added in (None, shared):
                act = torch.randn(num_tokens, top_k, inner, device=GPU).to(dtype)
                expected = two_launches(act, weight, blocks, routed, added)
                rows = quantize_rows(act, GROUPS)
                for _ in range(10):
                    out = torch.full_like(expected, float("nan"))
                    fp8_ranged_down(
                        rows, weight, blocks, out, tiles, routed, empty_marks(weight, tiles),
                        shared=None if added is None else added.y,
                    )  # fmt: skip
                    assert torch.equal(out, expected)


def test_a_whole_layer_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed, it has the bits of the layer with a sum of its own; beside another stream's launches, too."""
    experts, hidden, inner, top_k, num_tokens = 32, 2048, 256, 8, 1000
    gate_up = ExpertProjection(
        fp8_matrices((experts, 2 * inner, hidden), "block", (inner, inner)), None, "concatenated"
    )
    down = ExpertProjection(fp8_matrices((experts, hidden, inner), "block", (hidden,)), None, None)
    x = torch.randn(num_tokens, hidden, device=GPU).to(BF16)
    ids = torch.rand(num_tokens, experts, device=GPU).topk(top_k, dim=1).indices.to(torch.int32)
    routed = torch.rand(num_tokens, top_k, device=GPU)

    def run(ranged: RangedTiles | None) -> torch.Tensor:
        def select(*_: Any, **__: Any) -> MoeTiles:
            return MoeTiles(WHOLE, WHOLE, ranged)

        monkeypatch.setattr(experts_room, "select_experts", select)
        return moe_experts(x, routed, ids, gate_up, down, GatedActivation(1.702, 7.0, 1.0))

    expected = run(None)
    assert torch.equal(run(RANGED[1]), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(RANGED[1])
    other = torch.cuda.Stream()
    noise = torch.randn(4096, 4096, device=GPU).to(BF16)
    for _ in range(20):
        with torch.cuda.stream(other):
            torch.mm(noise, noise)  # takes multiprocessors from whoever comes
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
