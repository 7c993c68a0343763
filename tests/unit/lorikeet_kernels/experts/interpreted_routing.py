"""Routing under the Triton interpreter, run by test_routing.py in a process of its own.

TRITON_INTERPRET is read when a kernel is defined, so it must be set before the first import.
"""

import torch

from lorikeet_kernels.experts.routing import (
    RouterLora,
    route_rows,
    route_sigmoid,
    route_sigmoid_grouped,
    route_softmax,
    route_softmax_grouped,
)
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.testing import SiteShape, SlotSite, make_tables


def check_routing() -> None:
    """Every rule with adapters of several ranks, source rows and both, masks for experts and groups."""
    for experts, num_groups, hidden in ((13, 1, 45), (32, 8, 1300), (30, 5, 45), (24, 3, 45), (20, 4, 45)):
        x = torch.randn(7, hidden)
        tables = make_tables(
            [SiteShape(hidden, 8), SiteShape(hidden, experts)],
            [[SlotSite(8), SlotSite(rank)] for rank in (8, 0, 24)],
            dtype=torch.float32,
        )
        segments = make_lora_segments(torch.tensor([0, -1, 2, 1, 2, 0, -1], dtype=torch.int32), 3)
        logits, bias = torch.randn(7, experts), torch.randn(experts)
        rows = torch.tensor([0, 1, 2, 3, 4, 1, 0])
        for lora in (None, RouterLora(x, segments, tables, 1)):
            for source in (None, rows):
                both = {"lora": lora, "source_rows": source}
                pairs = [
                    (
                        route_rows(logits, lora, source, None, 4, sigmoid=False, renormalize=True),
                        route_softmax(logits, 4, renormalize=True, **both),
                    ),
                    (
                        route_rows(logits, lora, source, None, 1, sigmoid=True),
                        route_sigmoid(logits, 1, **both),
                    ),
                ]
                groups = {"num_groups": num_groups, "top_k_groups": (num_groups + 1) // 2, "scale": 2.5}
                pairs.append(
                    (
                        route_rows(logits, lora, source, bias, 4, sigmoid=True, renormalize=True, **groups),
                        route_sigmoid_grouped(logits, bias, 4, renormalize=True, **groups, **both),
                    )
                )
                pairs.append(
                    (
                        route_rows(logits, lora, source, None, 4, sigmoid=False, **groups),
                        route_softmax_grouped(logits, 4, **groups, **both),
                    )
                )
                for got, expected in pairs:
                    assert torch.equal(got[1], expected[1])
                    torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-5)
        without = route_softmax(logits, 4, renormalize=True)
        chosen = route_rows(logits, RouterLora(x, segments, tables, 1), None, None, 4, sigmoid=False)[1]
        same = segments.token_slot % 2 != 0
        assert torch.equal(chosen[same], without[1][same])
        assert not torch.equal(chosen, without[1])


if __name__ == "__main__":
    check_routing()
