"""Where FP8 experts' down makes its delta in its own launch."""

from dataclasses import replace

import pytest
import torch

from lorikeet_kernels.dense.quantize_rows import quantize_rows_reference
from lorikeet_kernels.experts import joined_down as module
from lorikeet_kernels.experts.expert_blocks import expert_blocks_reference
from lorikeet_kernels.experts.joined_down import joined_down
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.testing import SiteShape, SlotSite, make_tables, random_fp8_weight
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles

EXPERTS, TOP_K, INNER, HIDDEN, BF16 = 4, 2, 128, 64, torch.bfloat16
TILES = ExpertTiles("decode", 16, 64, 64, 2, 4)


def is_joined(
    monkeypatch: pytest.MonkeyPatch, tiles: ExpertTiles, rank: int = 16, dtype: torch.dtype = BF16
) -> bool:
    """Whether a token's pairs take the one launch; else the delta is to be made by itself."""
    launched: list[object] = []
    monkeypatch.setattr(module, "fp8_gemm_lora", lambda *given, bias: launched.append((*given, bias)))
    monkeypatch.setattr(module, "quantize_rows", quantize_rows_reference)
    weight = random_fp8_weight(EXPERTS, (HIDDEN,), INNER, "block", torch.Generator().manual_seed(0))
    tables = make_tables([SiteShape(INNER, HIDDEN, EXPERTS)], [[SlotSite(rank)]], dtype=dtype)
    ids = torch.tensor([[2, 1]], dtype=torch.int32)
    out = torch.empty(1, TOP_K, HIDDEN, dtype=dtype)
    delta = joined_down(
        torch.zeros(1, TOP_K, INNER, dtype=dtype), weight, None,
        expert_blocks_reference(ids, EXPERTS, tiles.block_rows), out, ids, torch.rand(1, TOP_K), tiles,
        make_lora_segments(torch.zeros(1, dtype=torch.int32), 1), tables, 0,
    )  # fmt: skip
    assert (delta is None) == (not launched)
    assert delta is None or (delta.shape, delta.dtype) == (out.shape, dtype)
    return delta is not None


def test_few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the decode kernel."""
    assert is_joined(monkeypatch, TILES)


def test_some_batches_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, wide numbers, ranks whose words several lanes hold, warps that would share rows."""
    assert not is_joined(monkeypatch, replace(TILES, kernel="prefill"))
    assert not is_joined(monkeypatch, TILES, dtype=torch.float32)
    assert not is_joined(monkeypatch, TILES, rank=40)
    assert not is_joined(monkeypatch, replace(TILES, num_warps=64))
