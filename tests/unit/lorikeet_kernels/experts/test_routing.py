"""Routing references: choice, weights, ties; deltas and source rows; the kernel under the interpreter."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from lorikeet_kernels.experts.router_logits import LogitParts
from lorikeet_kernels.experts.routing import (
    RouterLora,
    route_rows,
    route_sigmoid,
    route_sigmoid_grouped,
    route_softmax,
    route_softmax_grouped,
)
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.testing import SiteShape, SlotSite, exact_delta, make_tables


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_softmax_renormalized_equals_softmax_of_chosen(num_tokens: int) -> None:
    """Softmax over all then made to sum to 1 is a softmax over the chosen logits."""
    logits = torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(3))
    weights, ids = route_softmax(logits, 4, renormalize=True)
    best = logits.topk(4, dim=1)
    assert torch.equal(ids.long(), best.indices)
    torch.testing.assert_close(weights, torch.softmax(best.values, dim=1))
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32


def test_softmax_plain_keeps_the_full_sum() -> None:
    """Without renormalizing, weights are the softmax's own values."""
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))
    weights, ids = route_softmax(logits, 2, renormalize=False)
    torch.testing.assert_close(weights, torch.softmax(logits, 1).gather(1, ids.long()))


def test_ties_choose_the_lower_expert() -> None:
    """Equal logits choose experts 0, 1, 2 in that order."""
    _, ids = route_softmax(torch.zeros(2, 16), 3, renormalize=True)
    assert ids.tolist() == [[0, 1, 2]] * 2


def test_sigmoid_grouped_stays_within_the_best_groups() -> None:
    """Experts come from the groups whose two best biased scores are largest; weights leave the bias out."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(13, 16, generator=generator)
    bias = torch.randn(16, generator=generator)
    weights, ids = route_sigmoid_grouped(
        logits, bias, 4, num_groups=4, top_k_groups=2, renormalize=True, scale=2.5
    )
    for t in range(13):
        biased = [(float(torch.sigmoid(logits[t, e]) + bias[e]), e) for e in range(16)]
        totals = [sum(sorted((s for s, _ in biased[4 * g : 4 * g + 4]), reverse=True)[:2]) for g in range(4)]
        best = sorted(range(4), key=lambda g: -totals[g])[:2]
        allowed = [entry for entry in biased if entry[1] // 4 in best]
        chosen = [e for _, e in sorted(allowed, reverse=True)[:4]]
        assert ids[t].tolist() == chosen
        plain = torch.sigmoid(logits[t, chosen])
        torch.testing.assert_close(weights[t], plain / plain.sum() * 2.5)


@pytest.mark.parametrize(("num_groups", "top_k_groups"), [(1, 1), (4, 2), (4, 4), (8, 3)])
def test_softmax_grouped_stays_within_the_best_groups(num_groups: int, top_k_groups: int) -> None:
    """A group counts by its best expert; weights are the whole softmax's, scaled."""
    logits = torch.randn(13, 16, generator=torch.Generator().manual_seed(5))
    weights, ids = route_softmax_grouped(
        logits, 3, num_groups=num_groups, top_k_groups=top_k_groups, scale=16.0
    )
    size = 16 // num_groups
    for t in range(13):
        scores = torch.softmax(logits[t], 0).tolist()
        best = sorted(range(num_groups), key=lambda g: -max(scores[g * size : (g + 1) * size]))
        allowed = [e for e in range(16) if e // size in best[:top_k_groups]]
        chosen = sorted(allowed, key=lambda e: -scores[e])[:3]
        assert ids[t].tolist() == chosen
        torch.testing.assert_close(weights[t], torch.tensor([scores[e] * 16.0 for e in chosen]))


def test_sigmoid_top1() -> None:
    """The chosen logit's own sigmoid is the weight."""
    weights, ids = route_sigmoid(torch.tensor([[0.5, 2.0, -1.0]]), 1)
    assert ids.tolist() == [[1]]
    torch.testing.assert_close(weights, torch.sigmoid(torch.tensor([[2.0]])))


def test_adapters_are_added_and_rounded_and_rows_route_as_others() -> None:
    """As if the sum had been stored, and the rows picked, before; logits in parts are added up first."""
    generator = torch.Generator().manual_seed(5)
    parts = torch.randn(2, 7, 16, generator=generator)
    logits = parts.sum(0).bfloat16()
    x, rows = torch.randn(7, 24, generator=generator).bfloat16(), torch.tensor([0, 6, 2, 2, 4, 5, 0])
    tables = make_tables([SiteShape(24, 16)], [[SlotSite(5)], [SlotSite(0)], [SlotSite(16)]], dtype=x.dtype)
    slots = torch.tensor([0, -1, 2, 1, 2, 0, -1], dtype=torch.int32)
    lora = RouterLora(x, make_lora_segments(slots, 3), tables, 0)
    deltas = [exact_delta(x[t], tables, int(slots[t]), 0, 0, 16, "concatenated") for t in range(7)]
    stored = (logits.double() + torch.stack(deltas)).bfloat16()[rows]
    bias = torch.randn(16, generator=generator)
    grouped = {"num_groups": 4, "top_k_groups": 2, "scale": 2.5}
    for route in (
        partial(route_softmax, top_k=3, renormalize=True),
        partial(route_sigmoid, top_k=2),
        partial(route_softmax_grouped, top_k=3, **grouped),
        partial(route_sigmoid_grouped, correction_bias=bias, top_k=3, renormalize=True, **grouped),
    ):
        expected, expected_ids = route(stored)
        for given in (logits, LogitParts(parts, None, torch.bfloat16)):
            weights, ids = route(given, lora=lora, source_rows=rows)
            torch.testing.assert_close(weights, expected, rtol=0.02, atol=1e-3)
            assert torch.equal(ids, expected_ids)


@pytest.mark.long
def test_kernel_matches_references_under_the_interpreter() -> None:
    """See interpreted_routing.py."""
    script = Path(__file__).with_name("interpreted_routing.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("top_k", [-1, 0, 9])
def test_no_more_experts_are_chosen_than_there_are(top_k: int) -> None:
    """By any rule; with groups, no more than the chosen ones hold."""
    logits = torch.randn(3, 8)
    with pytest.raises(ValueError, match=f"routing: {top_k} of 8 experts"):
        route_softmax(logits, top_k, renormalize=True)
    with pytest.raises(ValueError, match=f"routing: {top_k} of 8 experts"):
        route_sigmoid(logits, top_k)
    with pytest.raises(ValueError, match="routing: 5 of 4 experts"):
        route_softmax_grouped(logits, 5, num_groups=2, top_k_groups=1, scale=1.0)
    with pytest.raises(ValueError, match="routing: 5 of 4 experts"):
        route_sigmoid_grouped(
            logits, torch.zeros(8), 5, num_groups=2, top_k_groups=1, renormalize=True, scale=1.0
        )


def test_groups_and_biases_that_do_not_fit_are_refused() -> None:
    """A bias of one element would be added to all experts, and read beyond its end on a GPU."""
    logits = torch.randn(3, 8)
    for num_groups, top_k_groups in ((3, 1), (0, 1), (2, 3), (2, 0)):
        with pytest.raises(ValueError, match="groups"):
            route_softmax_grouped(logits, 2, num_groups=num_groups, top_k_groups=top_k_groups, scale=1.0)
    for size in (1, 7):
        with pytest.raises(ValueError, match=rf"bias \({size},\) does not fit 8 experts"):
            route_sigmoid_grouped(
                logits, torch.zeros(size), 2, num_groups=2, top_k_groups=1, renormalize=True, scale=1.0
            )
    ids = route_softmax_grouped(torch.empty(0, 8), 2, num_groups=2, top_k_groups=1, scale=1.0)[1]
    assert ids.shape == (0, 2)


def test_a_router_site_that_the_tables_lack_is_refused() -> None:
    """By the launch as by the reference: the kernel would look it up in other memory."""
    tables = make_tables([SiteShape(8, 4)], [[SlotSite(8)]], dtype=torch.float32)
    segments = make_lora_segments(torch.zeros(2, dtype=torch.int32), 1)
    logits, lora = torch.zeros(2, 4), RouterLora(torch.zeros(2, 8), segments, tables, 1)
    with pytest.raises(ValueError, match="of the tables' 1"):
        route_softmax(logits, 2, renormalize=True, lora=lora)
    with pytest.raises(ValueError, match="of the tables' 1"):
        route_rows(logits, lora, None, None, 2, sigmoid=False)
