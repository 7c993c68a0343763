"""Projections of heads of few rows, alone and with adapters: the kernels, what they refuse, their tiles."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lorikeet_kernels.dense.few_heads_linear import few_heads_linear, takes_heads
from lorikeet_kernels.lora.few_heads_lora import few_heads_lora, joined_heads
from lorikeet_kernels.lora.head_lora import HeadRows
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.testing import SiteShape, SlotSite, make_tables
from lorikeet_kernels.tiling.few_heads_tiles import FewHeadsTiles, select_few_heads, takes_few_heads
from lorikeet_kernels.tiling.measured import MEASURED

BF16 = torch.bfloat16


def test_kernels_match_float64_under_the_interpreter() -> None:
    """See interpreted_few_heads.py."""
    script = Path(__file__).with_name("interpreted_few_heads.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def _shifted(rows: torch.Tensor, *, by: int) -> torch.Tensor:
    """A copy that begins so many numbers behind 16 bytes."""
    return torch.zeros(rows.numel() + by, dtype=rows.dtype)[by:].view(rows.shape).copy_(rows)


def test_what_the_kernels_do_not_read() -> None:
    """Other dtypes, rows that are not contiguous or lie between 16 bytes; a CPU's are the references'."""
    x, weight, out = torch.zeros(2, 3, 16).to(BF16), torch.zeros(3, 16, 8).to(BF16), torch.zeros(2, 3, 8)
    assert takes_heads(x, weight, out.to(BF16))
    assert takes_heads(x, weight.transpose(1, 2).contiguous().transpose(1, 2), out.to(BF16))
    assert not takes_heads(x, weight, out)
    assert not takes_heads(x.float(), weight.float(), out)
    assert not takes_heads(torch.zeros(2, 3, 20).to(BF16)[..., :16], weight, out.to(BF16))
    assert not takes_heads(torch.zeros(2, 16, 3).to(BF16).transpose(1, 2), weight, out.to(BF16))
    assert not takes_heads(x, torch.zeros(3, 16, 8, 2).to(BF16)[..., 0], out.to(BF16))
    for shifted in (0, 1, 2):
        own = [_shifted(rows, by=int(i == shifted)) for i, rows in enumerate((x, weight, out.to(BF16)))]
        assert not takes_heads(own[0], own[1], own[2])
    with pytest.raises(ValueError, match="16 bits"):
        few_heads_linear(x.float(), weight.float(), out, FewHeadsTiles(8))
    for rows, to in ((x[:, :2], out), (x[:, :, :8], out), (x, out[:1]), (x, out[:, :1]), (x, out[..., :4])):
        with pytest.raises(ValueError, match="heads' weight"):
            few_heads_linear(rows, weight, to.to(BF16), FewHeadsTiles(8))
    tables = make_tables([SiteShape(16, 3 * 12)], [[SlotSite(8)]], dtype=BF16)
    segments = make_lora_segments(torch.zeros(2, dtype=torch.int32), 1)
    rows, tiles = HeadRows(12, 0, 8), FewHeadsTiles(8)
    where = (x, weight, out.to(BF16), segments, tables, 0)
    assert not joined_heads(*where, rows, down=False)
    with pytest.raises(ValueError, match="do not fit"):
        few_heads_lora(*where, rows, tiles, down=True)
    with pytest.raises(ValueError, match="do not fit"):
        few_heads_lora(*where, HeadRows(12, 5, 8), tiles, down=False)
    with pytest.raises(ValueError, match="16 bits"):
        few_heads_lora(x, weight, out, segments, tables, 0, rows, tiles, down=False)
    with pytest.raises(ValueError, match="heads' weight"):
        few_heads_lora(x, weight[:2], out.to(BF16), segments, tables, 0, rows, tiles, down=False)
    with pytest.raises(ValueError, match="another batch"):
        few_heads_lora(x[:1], weight, out[:1].to(BF16), segments, tables, 0, rows, tiles, down=False)
    for site in (-1, 1):
        with pytest.raises(ValueError, match="of the tables' 1"):
            few_heads_lora(*where[:-1], site, rows, tiles, down=False)


def test_tiles() -> None:
    """128 programs of 16 heads of DeepSeek's sizes; no more columns than there are."""
    assert select_few_heads(128, 512) == FewHeadsTiles(64)
    assert select_few_heads(512, 128) == FewHeadsTiles(16)
    assert select_few_heads(16, 24) == FewHeadsTiles(32)


def test_only_measured_devices_take_the_own_kernel() -> None:
    """And these no more where measurements do not decide."""
    assert takes_few_heads(1, "NVIDIA H200")
    assert not takes_few_heads(0, "NVIDIA H200")
    assert not takes_few_heads(64, "NVIDIA H200")
    assert not takes_few_heads(1, "cpu")
    MEASURED.use(wanted=False)
    try:
        assert not takes_few_heads(1, "NVIDIA H200")
    finally:
        MEASURED.use(wanted=True)
