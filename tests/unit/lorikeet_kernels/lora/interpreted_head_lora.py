"""Cases for the Triton interpreter, run by test_head_lora.py in a process of their own.

TRITON_INTERPRET is read when a kernel is defined, so it must be set before the first import.
"""

from dataclasses import replace

import torch

from lorikeet_kernels.lora.group_blocks import group_pairs
from lorikeet_kernels.lora.head_lora import HeadRows, add_head_lora, head_lora_reference
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.testing import TOLERANCE, SiteShape, SlotSite, make_tables, relative_error

HEADS, PLAIN, VALUE, LATENT = 3, 20, 17, 140
STRIDE = PLAIN + VALUE


def check(num_tokens: int, dtype: torch.dtype) -> None:
    """Both directions, by token and by blocks of a slot's tokens, ragged sizes, strided heads."""
    slot_sites = [[SlotSite(rank)] for rank in (8, 33, 0)]
    tables = make_tables([SiteShape(LATENT, HEADS * STRIDE)], slot_sites, dtype=dtype)
    generator = torch.Generator().manual_seed(num_tokens)
    slots = torch.randint(-1, 3, (num_tokens,), generator=generator, dtype=torch.int32)
    alone = make_lora_segments(slots, 3)
    blocks = group_pairs(None, slots, 1, 3, 16, LoraWorkspace(torch.device("cpu")))
    for down, size, width, rows in (
        (True, PLAIN, LATENT, HeadRows(STRIDE, 0, PLAIN)),
        (False, LATENT, VALUE, HeadRows(STRIDE, PLAIN, VALUE)),
    ):
        x = torch.randn(num_tokens, HEADS, size + 5, generator=generator).to(dtype)[..., :size]
        base = torch.randn(num_tokens, HEADS, width + 2, generator=generator).to(dtype)
        expected = base.clone()
        head_lora_reference(expected[..., :width], x, alone, tables, 0, rows, down=down)
        for segments in (alone, replace(alone, blocks=blocks)):
            out = base.clone()
            add_head_lora(out[..., :width], x, segments, tables, 0, rows, down=down)
            assert relative_error(out, expected) < TOLERANCE[dtype]
            same = (slots < 0) | (slots == 2)
            assert torch.equal(out[same], base[same])


if __name__ == "__main__":
    check(1, torch.float32)
    check(40, torch.float32)
    check(7, torch.float16)
