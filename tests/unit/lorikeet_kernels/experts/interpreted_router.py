"""Router logits in parts, and their routing, in Triton's interpreter, run by test_router_logits.py.

TRITON_INTERPRET is read when a kernel is defined, so it must be set before the first import. float32 and
float16 only: the interpreter multiplies bfloat16 as bit patterns.
"""

import torch

from lorikeet_kernels.experts.router_logits import router_logits, router_logits_reference
from lorikeet_kernels.experts.routing import RouterLora, route_rows
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.testing import TOLERANCE, SiteShape, SlotSite, make_tables, relative_error
from lorikeet_kernels.tiling.router_tiles import RouterTiles


def check_logits() -> None:
    """Ragged parts, experts that fill no program, several blocks of rows; a row's bits are its own."""
    generator = torch.Generator().manual_seed(3)
    for dtype in (torch.float32, torch.float16):
        for experts, hidden, columns in ((5, 72, 32), (40, 64, 64), (32, 136, 128)):
            weight = torch.randn(experts, hidden, generator=generator).to(dtype)
            bias = torch.randn(experts, generator=generator).to(dtype)
            x = torch.randn(40, hidden, generator=generator).to(dtype)
            exact = x.double() @ weight.double().T + bias.double()
            tiles, rows = RouterTiles(columns, 4), []
            for num_rows in (1, 17, 40):
                logits = router_logits(x[:num_rows], weight, bias, tiles)
                expected = router_logits_reference(x[:num_rows], weight, bias, tiles)
                assert relative_error(logits.parts, expected.parts) < TOLERANCE[torch.float32]
                assert logits.whole().dtype == dtype
                assert relative_error(logits.whole(), exact[:num_rows]) < TOLERANCE[dtype]
                rows.append(logits.parts[:, 0])
            assert all(torch.equal(row, rows[0]) for row in rows)


def check_routing() -> None:
    """Parts route as the logits that they add up to do: every rule, with adapters and rows of others."""
    generator = torch.Generator().manual_seed(4)
    for dtype in (torch.float32, torch.float16):
        for experts in (13, 32):
            weight = torch.randn(experts, 72, generator=generator).to(dtype)
            x = torch.randn(6, 72, generator=generator).to(dtype)
            bias = torch.randn(experts, generator=generator).to(dtype)
            correction = torch.randn(experts, generator=generator)
            tables = make_tables([SiteShape(72, experts)], [[SlotSite(8)], [SlotSite(3)]], dtype=dtype)
            slots = torch.tensor([0, 1, -1, 0, 1, 1], dtype=torch.int32)
            lora = RouterLora(x, make_lora_segments(slots, 2), tables, 0)
            source = torch.tensor([5, 0, 2, 2, 1, 3])
            for added in (None, bias):
                parts = router_logits(x, weight, added, RouterTiles(32, 4))
                for d, rows in ((None, None), (lora, None), (None, source), (lora, source)):
                    for rule in (
                        {"correction_bias": None, "sigmoid": False, "renormalize": True},
                        {"correction_bias": None, "sigmoid": True},
                        {"correction_bias": correction, "sigmoid": True, "scale": 2.5},
                    ):
                        got = route_rows(parts, d, rows, top_k=3, **rule)
                        expected = route_rows(parts.whole(), d, rows, top_k=3, **rule)
                        assert torch.equal(got[0], expected[0])
                        assert torch.equal(got[1], expected[1])


if __name__ == "__main__":
    check_logits()
    check_routing()
