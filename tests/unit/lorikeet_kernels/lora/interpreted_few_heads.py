"""Projections of heads of few rows in the interpreter, alone and with adapters; run by test_few_heads.py.

TRITON_INTERPRET is read when a kernel is defined, so it must be set before the first import.
"""

import torch

from lorikeet_kernels.dense.few_heads_linear import few_heads_linear
from lorikeet_kernels.lora.few_heads_lora import few_heads_lora
from lorikeet_kernels.lora.head_lora import HeadRows
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_weights import site_a, site_b
from lorikeet_kernels.testing import TOLERANCE, SiteShape, SlotSite, make_tables, relative_error
from lorikeet_kernels.tiling.few_heads_tiles import FewHeadsTiles

HEADS, PLAIN, VALUE, LATENT, DTYPE = 3, 24, 20, 40, torch.float16
STRIDE = PLAIN + VALUE


def check(num_slots: int, ranks: tuple[int, int, int]) -> None:
    """Both directions against float64: columns that fill no program, parts of wider rows."""
    slot_sites = [[SlotSite(rank)] for rank in (*ranks, *(0,) * (num_slots - 3))]
    tables = make_tables([SiteShape(LATENT, HEADS * STRIDE)], slot_sites, dtype=DTYPE)
    generator = torch.Generator().manual_seed(num_slots)
    up = torch.randn(HEADS, STRIDE, LATENT, generator=generator).to(DTYPE)
    for down, size, width, rows, weight in (
        (True, PLAIN, LATENT, HeadRows(STRIDE, 0, PLAIN), up[:, :PLAIN]),
        (False, LATENT, VALUE, HeadRows(STRIDE, PLAIN, VALUE), up[:, PLAIN:].transpose(1, 2)),
    ):
        for tiles, slots in (
            (FewHeadsTiles(16), [1]),
            (FewHeadsTiles(8), [0, -1, 1]),
            (FewHeadsTiles(16), [2, 1, -1, 0, 0]),
        ):
            x = torch.randn(len(slots), HEADS, size + 8, generator=generator).to(DTYPE)[..., :size]
            expected = torch.einsum("thi,hio->tho", x.double(), weight.double())
            wide = torch.full((len(slots), HEADS, width + 3), float("nan"), dtype=DTYPE)
            base = few_heads_linear(x, weight, wide[..., :width], tiles).clone()
            assert relative_error(base, expected) < TOLERANCE[DTYPE]
            alone = few_heads_linear(x[:1], weight, torch.empty(1, HEADS, width, dtype=DTYPE), tiles)
            assert torch.equal(alone[0], base[0])
            for t, slot in enumerate(slots):
                if slot < 0 or not ranks[slot]:
                    continue
                a = site_a(tables, slot, 0, LATENT)[0, 0].double()
                b = site_b(tables, slot, 0, HEADS * STRIDE)[0].double().view(HEADS, STRIDE, -1)
                b = b[:, rows.first : rows.first + rows.count]
                own = x[t].double()
                made = (own[:, None] @ b @ a) if down else (own @ a.T)[:, None] @ b.transpose(1, 2)
                expected[t] += made[:, 0]
            segments = make_lora_segments(torch.tensor(slots, dtype=torch.int32), num_slots)
            out = wide[..., :width]
            few_heads_lora(x, weight, out, segments, tables, 0, rows, tiles, down=down)
            assert relative_error(out, expected) < TOLERANCE[DTYPE]
            same = [t for t, slot in enumerate(slots) if slot < 0 or not ranks[slot]]
            assert torch.equal(out[same], base[same])
            assert wide[..., width:].isnan().all()


if __name__ == "__main__":
    check(3, (8, 30, 0))
    check(40, (16, 0, 8))
