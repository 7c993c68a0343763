"""Where experts' down makes its delta in its own launch, and which launch that is."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from lorikeet_kernels.dense.quantize_rows import quantize_rows_reference
from lorikeet_kernels.experts import joined_down as module
from lorikeet_kernels.experts.expert_blocks import expert_blocks_reference
from lorikeet_kernels.experts.joined_down import joined_down
from lorikeet_kernels.experts.mxfp4_layout import lay_out_mxfp4
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.testing import (
    SiteShape,
    SlotSite,
    make_tables,
    random_fp8_weight,
    random_mxfp4_weight,
)
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles

EXPERTS, TOP_K, INNER, HIDDEN, BF16 = 4, 2, 128, 64, torch.bfloat16
TILES = ExpertTiles("decode", 16, 64, 64, 2, 4)


def launched(
    monkeypatch: pytest.MonkeyPatch, kind: str, tiles: ExpertTiles, rank: int = 16, dtype: torch.dtype = BF16
) -> str | None:
    """The launch that a token's pairs take; None: the delta is made by itself."""
    found: list[str] = []

    def note(name: str, *_: object, bias: torch.Tensor | None) -> None:
        assert bias is None
        found.append(name)

    for name in ("expert_gemm_lora", "fp8_gemm_lora"):
        monkeypatch.setattr(module, name, partial(note, name))
    monkeypatch.setattr(module, "quantize_rows", quantize_rows_reference)
    generator = torch.Generator().manual_seed(0)
    weights = {
        "plain": lambda: torch.zeros(EXPERTS, HIDDEN, INNER, dtype=dtype),
        "fp8": lambda: random_fp8_weight(EXPERTS, (HIDDEN,), INNER, "block", generator),
        "mxfp4": lambda: lay_out_mxfp4(random_mxfp4_weight(EXPERTS, HIDDEN, INNER, generator), pairing=None),
    }
    tables = make_tables([SiteShape(INNER, HIDDEN, EXPERTS)], [[SlotSite(rank)]], dtype=dtype)
    ids = torch.tensor([[2, 1]], dtype=torch.int32)
    out = torch.empty(1, TOP_K, HIDDEN, dtype=dtype)
    delta = joined_down(
        torch.zeros(1, TOP_K, INNER, dtype=dtype), weights[kind](), None,
        expert_blocks_reference(ids, EXPERTS, tiles.block_rows), out, ids, torch.rand(1, TOP_K), tiles,
        make_lora_segments(torch.zeros(1, dtype=torch.int32), 1), tables, 0,
    )  # fmt: skip
    assert (delta is None) == (not found)
    assert delta is None or (delta.shape, delta.dtype) == (out.shape, dtype)
    return found[0] if found else None


def test_each_storage_has_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """MXFP4's kernel is written in another language."""
    assert launched(monkeypatch, "plain", TILES) == "expert_gemm_lora"
    assert launched(monkeypatch, "fp8", TILES) == "fp8_gemm_lora"
    assert launched(monkeypatch, "mxfp4", TILES) is None


def test_some_batches_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, wide numbers, ranks whose words several lanes hold, warps that would share rows."""
    assert launched(monkeypatch, "plain", replace(TILES, kernel="prefill")) is None
    assert launched(monkeypatch, "plain", TILES, dtype=torch.float32) is None
    assert launched(monkeypatch, "plain", TILES, rank=40) is None
    assert launched(monkeypatch, "plain", replace(TILES, num_warps=64)) is None
