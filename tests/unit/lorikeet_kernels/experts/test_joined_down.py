"""Where FP8 experts' down makes its delta in its own launch."""

from dataclasses import replace

import pytest
import torch

from lorikeet_kernels.dense.quantize_rows import quantize_rows_reference
from lorikeet_kernels.experts.expert_blocks import expert_blocks_reference
from lorikeet_kernels.experts.fp8_gemm_lora import fp8_gemm_lora
from lorikeet_kernels.experts.joined_down import joined_down, select_joined_down
from lorikeet_kernels.lora.joined_delta import JoinedSites
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.testing import SiteShape, SlotSite, make_tables, random_fp8_weight
from lorikeet_kernels.tiling import OpShape, PairTiles
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles

EXPERTS, TOP_K, INNER, HIDDEN, BF16 = 4, 2, 128, 64, torch.bfloat16
TILES = ExpertTiles("decode", 16, 64, 64, 2, 4)
SHAPE = OpShape("down", INNER, HIDDEN, 16, TOP_K)


def test_few_pairs() -> None:
    """By the decode kernel; no prompts, ranks whose words several lanes hold, warps that would share rows."""
    assert select_joined_down(SHAPE, TILES, "cpu") is not None
    assert select_joined_down(SHAPE, replace(TILES, kernel="prefill"), "cpu") is None
    assert select_joined_down(replace(SHAPE, max_rank=40), TILES, "cpu") is None
    assert select_joined_down(SHAPE, replace(TILES, num_warps=64), "cpu") is None


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_cpu_has_none(num_tokens: int) -> None:
    """Whoever asks makes the delta by itself."""
    generator = torch.Generator().manual_seed(0)
    weight = random_fp8_weight(EXPERTS, (HIDDEN,), INNER, "block", generator)
    tables = make_tables([SiteShape(INNER, HIDDEN, EXPERTS)], [[SlotSite(16)]], dtype=BF16)
    ids = torch.zeros(num_tokens, TOP_K, dtype=torch.int32)
    blocks = expert_blocks_reference(ids, EXPERTS, TILES.block_rows)
    act, out = torch.zeros(num_tokens, TOP_K, INNER).to(BF16), torch.zeros(num_tokens, TOP_K, HIDDEN).to(BF16)
    segments = make_lora_segments(torch.zeros(num_tokens, dtype=torch.int32), 1)
    made = joined_down(
        act, weight, None, blocks, out, ids, torch.rand(num_tokens, TOP_K), TILES, segments, tables, 0
    )
    assert made is None


def test_what_the_launch_refuses() -> None:
    """Ids and weights that it would misread, rows and blocks of another batch, a site that is none."""
    weight = random_fp8_weight(EXPERTS, (HIDDEN,), INNER, "block", torch.Generator().manual_seed(0))
    tables = make_tables([SiteShape(INNER, HIDDEN, EXPERTS)], [[SlotSite(16)]], dtype=BF16)
    ids, routed = torch.tensor([[2, 1], [0, 3]], dtype=torch.int32), torch.rand(2, TOP_K)
    blocks = expert_blocks_reference(ids, EXPERTS, TILES.block_rows)
    act = torch.zeros(2, TOP_K, INNER).to(BF16)
    out, delta = torch.zeros(2, 2, TOP_K, HIDDEN).to(BF16).unbind()
    segments = make_lora_segments(torch.zeros(2, dtype=torch.int32), 1)
    tiles = PairTiles(16, 64, 64, 4)
    adapters = JoinedSites(segments, tables, (0,), (HIDDEN,), (1,), tiles, TOP_K)

    def launch(
        x: torch.Tensor = act,
        into: torch.Tensor = delta,
        ids: torch.Tensor = ids,
        routed: torch.Tensor = routed,
        adapters: JoinedSites = adapters,
        bias: torch.Tensor | None = None,
    ) -> None:
        rows = quantize_rows_reference(act, weight.activations)
        fp8_gemm_lora(rows, x, weight, blocks, out, into, ids, routed, TILES, adapters, bias=bias)

    with pytest.raises(ValueError, match="int32"):
        launch(ids=ids.long())
    with pytest.raises(ValueError, match="int32"):
        launch(ids=ids.T.contiguous().T)
    with pytest.raises(ValueError, match="float32"):
        launch(routed=routed.double())
    with pytest.raises(ValueError, match="float32"):
        launch(routed=routed.T.contiguous().T)
    with pytest.raises(ValueError, match="float32"):
        launch(routed=routed[:1])
    with pytest.raises(ValueError, match="4 pairs in blocks"):
        launch(ids=ids[:1], routed=routed[:1], x=act[:1], into=delta[:1])
    with pytest.raises(ValueError, match="fp8_gemm_lora: x"):
        launch(x=act[..., :64])
    with pytest.raises(ValueError, match="fp8_gemm_lora: x"):
        launch(into=delta[:1])
    with pytest.raises(ValueError, match="bias"):
        launch(bias=torch.zeros(HIDDEN).to(BF16))
    with pytest.raises(ValueError, match="of the tables' 1"):
        launch(adapters=replace(adapters, sites=(1,)))
