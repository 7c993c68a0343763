"""Routing under the Triton interpreter, run by test_routing.py in a process of its own.

TRITON_INTERPRET is read when a kernel is defined, so it must be set before the first import.
"""

import torch

from lorikeet_kernels.experts.routing import route_rows, route_sigmoid, route_sigmoid_grouped, route_softmax


def check_routing() -> None:
    """Every rule with a delta, with source rows and with both, over numbers of experts that need a mask."""
    for experts in (13, 32):
        logits, delta = torch.randn(7, experts).half(), torch.randn(7, experts)
        rows = torch.tensor([0, 1, 2, 3, 4, 1, 0])
        bias = torch.randn(experts)
        for added in (None, delta):
            for source in (None, rows):
                both = {"delta": added, "source_rows": source}
                pairs = [
                    (
                        route_rows(logits, added, source, None, 4, sigmoid=False, renormalize=True),
                        route_softmax(logits, 4, renormalize=True, **both),
                    ),
                    (
                        route_rows(logits, added, source, None, 1, sigmoid=True),
                        route_sigmoid(logits, 1, **both),
                    ),
                ]
                if experts == 32:
                    groups = {"num_groups": 8, "top_k_groups": 4, "renormalize": True, "scale": 2.5}
                    pairs.append(
                        (
                            route_rows(logits, added, source, bias, 4, sigmoid=True, **groups),
                            route_sigmoid_grouped(logits, bias, 4, **groups, **both),
                        )
                    )
                for got, expected in pairs:
                    assert torch.equal(got[1], expected[1])
                    torch.testing.assert_close(got[0], expected[0])


if __name__ == "__main__":
    check_routing()
