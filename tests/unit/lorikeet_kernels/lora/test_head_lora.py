"""LoRA absorbed into queries and sums of latent attention: reference, kernel under the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lorikeet_kernels.lora.head_lora import HeadRows, head_lora
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_weights import site_a, site_b
from lorikeet_kernels.testing import TOLERANCE, SiteShape, SlotSite, make_tables, relative_error

HEADS, PLAIN, VALUE, LATENT = 4, 12, 10, 24
STRIDE = PLAIN + VALUE
QUERY, SUM = HeadRows(STRIDE, 0, PLAIN), HeadRows(STRIDE, PLAIN, VALUE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 7, 60])
def test_both_directions_match_a_float64_loop(dtype: torch.dtype, num_tokens: int) -> None:
    """Ranks of their own, one slot without the site; rows without an adapter keep their bits."""
    slot_sites = [[SlotSite(8)], [SlotSite(33)], [SlotSite(0)]]
    tables = make_tables([SiteShape(LATENT, HEADS * STRIDE)], slot_sites, dtype=dtype)
    generator = torch.Generator().manual_seed(num_tokens)
    slots = torch.randint(-1, 3, (num_tokens,), generator=generator, dtype=torch.int32)
    for down, size, width, rows in ((True, PLAIN, LATENT, QUERY), (False, LATENT, VALUE, SUM)):
        x = torch.randn(num_tokens, HEADS, size, generator=generator).to(dtype)
        before = torch.randn(num_tokens, HEADS, width, generator=generator).to(dtype)
        out, expected = before.clone(), before.double()
        head_lora(out, x, make_lora_segments(slots, 3), tables, 0, rows, down=down)
        for t, slot in enumerate(slots.tolist()):
            if slot not in (0, 1):
                continue
            a = site_a(tables, slot, 0, LATENT)[0, 0].double()
            b = site_b(tables, slot, 0, HEADS * STRIDE)[0].double()
            for head in range(HEADS):
                own = b[head * STRIDE + rows.first : head * STRIDE + rows.first + rows.count]
                row = x[t, head].double()
                expected[t, head] += a.T @ (own.T @ row) if down else own @ (a @ row)
        assert relative_error(out, expected) < TOLERANCE[dtype]
        same = (slots < 0) | (slots == 2)
        assert torch.equal(out[same], before[same])


def test_what_does_not_fit_is_refused() -> None:
    """Rows of another number than the head's elements, other dtypes, other numbers of tokens."""
    tables = make_tables([SiteShape(LATENT, HEADS * STRIDE)], [[SlotSite(8)]], dtype=torch.float32)
    segments = make_lora_segments(torch.zeros(2, dtype=torch.int32), 1)
    x, out = torch.zeros(2, HEADS, PLAIN), torch.zeros(2, HEADS, LATENT)
    with pytest.raises(ValueError, match="do not fit"):
        head_lora(out, x, segments, tables, 0, SUM, down=True)
    with pytest.raises(ValueError, match="do not fit"):
        head_lora(out, x, segments, tables, 0, HeadRows(STRIDE, -1, PLAIN), down=True)
    with pytest.raises(ValueError, match="compute dtype"):
        head_lora(out.half(), x.half(), segments, tables, 0, QUERY, down=True)
    with pytest.raises(ValueError, match="2 rows"):
        head_lora(out[:1], x[:1], segments, tables, 0, QUERY, down=True)
    with pytest.raises(ValueError, match="of the tables' 1"):
        head_lora(out, x, segments, tables, 1, QUERY, down=True)


def test_kernel_matches_the_reference_under_the_interpreter() -> None:
    """See interpreted_head_lora.py."""
    script = Path(__file__).with_name("interpreted_head_lora.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
