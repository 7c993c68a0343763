"""Routing: which K experts each token goes to, and with which weight.

All maths in float32, whatever the logits' dtype. Equal scores choose the lower expert id, on every device,
so that a tie never makes two runs differ. Weights [T, K] float32, ids [T, K] int32, best first.

With `lora` the logits are those of the router with each row's adapter, the sum rounded to the logits' dtype.
With `source_rows` [T] int64 token t is routed as row source_rows[t]. Logits may be parts, which are added up
first.

Adapters seldom touch the router: a kernel of a token a program that finds none costs a look-up, where LoRA as
a launch of its own costs one, also beside the projection (gpt-oss-20b on an H200: 2 to 6 us a layer). Where
there is one, a program reads the router's A and B by itself: 190 KB at rank 32, predicted 5 us.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lorikeet_kernels.dense.sigmoid import sigmoid
from lorikeet_kernels.experts.expert_groups import allowed_lanes
from lorikeet_kernels.experts.router_logits import LogitParts
from lorikeet_kernels.experts.routing_sizes import check_sizes
from lorikeet_kernels.lora.lora_linear import lora_linear
from lorikeet_kernels.lora.lora_segments import LoraSegments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.row_delta import row_delta
from lorikeet_kernels.lora.site_lookup import find_site

MAX_LORA_ROWS = 256
"""Beyond, rows share adapters and `lora_linear` reads their weights less often."""

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class RouterLora:
    """The adapters of the router's site, and the rows [T, H] that they see."""

    x: torch.Tensor
    segments: LoraSegments
    tables: LoraTables
    site: int


def route_softmax_reference(
    logits: torch.Tensor, top_k: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, the K largest; `renormalize` makes the chosen weights sum to 1.

    With `renormalize` this equals a softmax over the chosen logits alone (gpt-oss, Mixtral).
    """
    check_sizes(logits.shape, top_k)
    # the choice is made on logits, where values that differ never become equal by rounding
    values, ids = _largest(logits.to(torch.float32), top_k)
    if renormalize:
        return torch.softmax(values, dim=1), ids.to(torch.int32)
    return torch.softmax(logits.to(torch.float32), dim=1).gather(1, ids), ids.to(torch.int32)


def route_sigmoid_grouped_reference(
    logits: torch.Tensor,
    correction_bias: torch.Tensor,
    top_k: int,
    *,
    num_groups: int,
    top_k_groups: int,
    renormalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoid scores, experts chosen within the best groups by score plus bias (DeepSeek-V3).

    A group's score is the sum of its two best biased scores. The bias steers the choice only; weights are the
    plain scores, optionally made to sum to 1, times `scale`.
    """
    check_sizes(
        logits.shape, top_k, num_groups=num_groups, top_k_groups=top_k_groups, correction_bias=correction_bias
    )
    num_tokens, num_experts = logits.shape
    scores = sigmoid(logits.to(torch.float32))
    biased = scores + correction_bias.to(torch.float32)
    grouped = biased.view(num_tokens, num_groups, num_experts // num_groups)
    group_scores = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(dim=2)
    _, ids = _largest(_within_groups(grouped, group_scores, top_k_groups), top_k)
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    return weights * scale, ids.to(torch.int32)


def route_softmax_grouped_reference(
    logits: torch.Tensor, top_k: int, *, num_groups: int, top_k_groups: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, the K largest within the best groups, times `scale` (DeepSeek-V2).

    A group's score is its best expert's.
    """
    logits = logits.to(torch.float32)
    check_sizes(logits.shape, top_k, num_groups=num_groups, top_k_groups=top_k_groups)
    # As in `route_softmax_reference`, the choice is made on logits.
    grouped = logits.view(logits.shape[0], num_groups, logits.shape[1] // num_groups)
    _, ids = _largest(_within_groups(grouped, grouped.amax(dim=2), top_k_groups), top_k)
    return torch.softmax(logits, dim=1).gather(1, ids) * scale, ids.to(torch.int32)


def route_sigmoid_reference(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The K largest logits, each weighted by its own sigmoid (Llama 4, K = 1)."""
    check_sizes(logits.shape, top_k)
    values, ids = _largest(logits.to(torch.float32), top_k)
    return sigmoid(values), ids.to(torch.int32)


def _within_groups(grouped: torch.Tensor, group_scores: torch.Tensor, count: int) -> torch.Tensor:
    """`grouped` [T, G, E / G] as [T, E], minus infinity outside each token's `count` best groups."""
    _, chosen = _largest(group_scores, count)
    allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, chosen, value=True)
    return grouped.masked_fill(~allowed[:, :, None], float("-inf")).flatten(1)


def _largest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    # topk leaves the order of equal values open; a stable sort does not
    values, ids = torch.sort(scores, dim=1, descending=True, stable=True)
    return values[:, :count].contiguous(), ids[:, :count].contiguous()


def _final_logits(
    logits: torch.Tensor | LogitParts, lora: RouterLora | None, source_rows: torch.Tensor | None
) -> torch.Tensor:
    if isinstance(logits, LogitParts):
        logits = logits.whole()
    if lora is not None:
        logits = logits.clone()
        lora_linear(logits, lora.x, lora.segments, lora.tables, (lora.site,), (logits.shape[1],))
    return logits if source_rows is None else logits.index_select(0, source_rows)


@triton.jit
def _sum_parts(
    parts_ptr, bias, row, num_rows, expert, inside,
    NUM_EXPERTS: tl.constexpr, SPLITS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A row of logits from its parts, in order, rounded once; minus infinity beyond the experts."""
    total = tl.zeros(expert.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        at = parts_ptr + (split * num_rows + row) * NUM_EXPERTS + expert
        total += tl.load(at, mask=inside, other=0.0)
    return tl.where(inside, (total + bias).to(DTYPE), float("-inf"))


@triton.jit
def _sum_in_any_order(values):
    """The sum of values from 0 to 1 in fixed point; NaN where one is NaN.

    Base rows have the same bits in batches with adapters and without, which are two kernels: how a compiler
    spreads a row over threads must not decide in which order it adds up.
    """
    exact = tl.sum((values * 1099511627776.0).to(tl.int64), axis=0)  # 2**40
    return exact.to(tl.float32) * (1.0 / 1099511627776.0) + tl.sum(values, axis=0) * 0.0


# where a bias lies decides nothing: a model's biases lie anywhere
@triton.jit(
    do_not_specialize=["num_rows", "site", "num_sites", "num_slots"],
    do_not_specialize_on_alignment=["rows_ptr", "bias_ptr", "router_bias_ptr"],
)
def _route_kernel(
    logits_ptr, rows_ptr, bias_ptr, router_bias_ptr, weights_ptr, ids_ptr, x_ptr, token_slot_ptr,
    arena_ptr, a_offset_ptr, b_offset_ptr, rank_ptr, num_a_ptr, site, num_sites, num_slots, num_rows, scale,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, TOP_K_P2: tl.constexpr, NUM_GROUPS: tl.constexpr,
    NUM_GROUPS_P2: tl.constexpr, MEMBERS_P2: tl.constexpr, TOP_K_GROUPS: tl.constexpr, SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, HAS_LORA: tl.constexpr, HAS_ROWS: tl.constexpr,
    SPLITS: tl.constexpr, HAS_ROUTER_BIAS: tl.constexpr, DTYPE: tl.constexpr, K: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    # a power of two of lanes for each group, so that the order of lanes is that of experts
    MEMBERS: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    BLOCK: tl.constexpr = NUM_GROUPS_P2 * MEMBERS_P2
    # One group ends where the experts do, and whole groups leave no lane out.
    IS_LANE: tl.constexpr = NUM_GROUPS == 1 or (NUM_GROUPS == NUM_GROUPS_P2 and MEMBERS == MEMBERS_P2)
    lane = tl.arange(0, BLOCK)
    if IS_LANE:
        expert = lane
        inside = lane < NUM_EXPERTS
    else:
        expert = lane // MEMBERS_P2 * MEMBERS + lane % MEMBERS_P2
        inside = (lane // MEMBERS_P2 < NUM_GROUPS) & (lane % MEMBERS_P2 < MEMBERS)
    router_bias = tl.zeros([BLOCK], tl.float32)
    if HAS_ROUTER_BIAS:
        router_bias += tl.load(router_bias_ptr + expert, mask=inside, other=0.0).to(tl.float32)
    row = token
    if HAS_ROWS:
        row = tl.load(rows_ptr + token)
    if HAS_LORA:
        slot = tl.load(token_slot_ptr + row)
        a_offset, rank, _ = find_site(a_offset_ptr, rank_ptr, num_a_ptr, slot, site, num_sites, num_slots, 0)
        b_offset, _, _ = find_site(b_offset_ptr, rank_ptr, num_a_ptr, slot, site, num_sites, num_slots, 0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if SPLITS > 0:
        logits = _sum_parts(
            logits_ptr, router_bias, row, num_rows, expert, inside, NUM_EXPERTS, SPLITS, DTYPE
        )
    else:
        logits = tl.load(logits_ptr + row * NUM_EXPERTS + expert, mask=inside, other=float("-inf"))
    if HAS_LORA:
        x_row = x_ptr + row * K
        delta = row_delta(x_row, arena_ptr, a_offset, b_offset, rank, expert, inside, K, BLOCK_K, 16)
        logits = (logits.to(tl.float32) + delta).to(logits.dtype)
    logits = logits.to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logits))
    else:
        shifted = tl.exp(logits - tl.max(logits, axis=0))
        score = shifted / _sum_in_any_order(shifted)
    key = logits
    if HAS_BIAS:
        key = score + tl.load(bias_ptr + expert, mask=inside, other=0.0).to(tl.float32)
    key = tl.where(inside, key, float("-inf"))
    if NUM_GROUPS > 1:
        allowed = allowed_lanes(key, NUM_GROUPS_P2, MEMBERS_P2, TOP_K_GROUPS, HAS_BIAS)
        key = tl.where(allowed, key, float("-inf"))
    place = tl.arange(0, TOP_K_P2)
    chosen = tl.zeros([TOP_K_P2], tl.int32)
    weights = tl.zeros([TOP_K_P2], tl.float32)
    taken = lane < 0
    total = 0.0
    for k in tl.static_range(TOP_K):
        winner = tl.argmax(tl.where(taken, float("-inf"), key), axis=0, tie_break_left=True)
        taken = taken | (lane == winner)
        if IS_LANE:
            chosen = tl.where(place == k, winner, chosen)
        else:
            chosen = tl.where(place == k, winner // MEMBERS_P2 * MEMBERS + winner % MEMBERS_P2, chosen)
        weight = tl.sum(tl.where(lane == winner, score, 0.0), axis=0)
        weights = tl.where(place == k, weight, weights)
        total += weight
    if RENORMALIZE:
        weights = weights / (total + 1e-20)
    tl.store(ids_ptr + token * TOP_K + place, chosen, mask=place < TOP_K)
    tl.store(weights_ptr + token * TOP_K + place, weights * scale, mask=place < TOP_K)


def route_rows(
    logits: torch.Tensor | LogitParts,
    lora: RouterLora | None,
    source_rows: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
    top_k: int,
    *,
    sigmoid: bool,
    num_groups: int = 1,
    top_k_groups: int = 1,
    renormalize: bool = False,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch; every rule on a GPU, and what the interpreter tests.

    Biases, `source_rows`, adapters' tables and slots are read while the launch before still runs: they must
    be older than it.
    """
    router_bias = splits = None
    dtype = logits.dtype
    if isinstance(logits, LogitParts):
        router_bias, splits, logits = logits.bias, logits.parts.shape[0], logits.parts
    num_tokens, num_experts = logits.shape[-2:]
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    check_sizes(
        logits.shape[-2:], top_k, num_groups=num_groups, top_k_groups=top_k_groups,
        correction_bias=correction_bias,
    )  # fmt: skip
    if lora is not None and (lora.x.shape[0] != num_tokens or not lora.x.is_contiguous()):
        raise ValueError(f"router's adapters see rows {tuple(lora.x.shape)} for {num_tokens} tokens")
    if source_rows is not None and source_rows.shape != (num_tokens,):
        raise ValueError(f"{tuple(source_rows.shape)} source rows for {num_tokens} tokens")
    pdl = logits.device.type == "cuda"
    hidden, tables = 0, (logits,) * 7
    sizes = (0, 0, 0)
    if lora is not None:
        lora.tables.check_sites(lora.site)
        t, hidden = lora.tables, lora.x.shape[1]
        tables = (lora.x, lora.segments.token_slot, t.arena, t.a_offset, t.b_offset, t.rank, t.num_a)
        sizes = (lora.site, t.rank.shape[1], t.rank.shape[0])
    if num_tokens > 0:
        _route_kernel[(num_tokens,)](
            logits.contiguous(), logits if source_rows is None else source_rows,
            logits if correction_bias is None else correction_bias,
            logits if router_bias is None else router_bias, weights, ids, *tables, *sizes, num_tokens, scale,
            NUM_EXPERTS=num_experts, TOP_K=top_k, TOP_K_P2=triton.next_power_of_2(top_k),
            NUM_GROUPS=num_groups, NUM_GROUPS_P2=triton.next_power_of_2(num_groups),
            MEMBERS_P2=triton.next_power_of_2(num_experts // num_groups), TOP_K_GROUPS=top_k_groups,
            SIGMOID=sigmoid, HAS_BIAS=correction_bias is not None, RENORMALIZE=renormalize,
            HAS_LORA=lora is not None, HAS_ROWS=source_rows is not None, SPLITS=splits or 0,
            HAS_ROUTER_BIAS=router_bias is not None,
            DTYPE=_TYPES[dtype], K=hidden, BLOCK_K=min(1024, triton.next_power_of_2(max(16, hidden))),
            PDL=pdl, num_warps=1 if lora is None else 4, **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return weights, ids


def route_softmax(
    logits: torch.Tensor | LogitParts,
    top_k: int,
    *,
    renormalize: bool,
    lora: RouterLora | None = None,
    source_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `route_softmax_reference`; `logits` [T, E]."""
    if logits.device.type == "cpu":
        logits = _final_logits(logits, lora, source_rows)
        return route_softmax_reference(logits, top_k, renormalize=renormalize)
    return route_rows(logits, lora, source_rows, None, top_k, sigmoid=False, renormalize=renormalize)


def route_sigmoid_grouped(
    logits: torch.Tensor | LogitParts,
    correction_bias: torch.Tensor,
    top_k: int,
    *,
    num_groups: int,
    top_k_groups: int,
    renormalize: bool,
    scale: float,
    lora: RouterLora | None = None,
    source_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `route_sigmoid_grouped_reference`; `logits` [T, E], `correction_bias` [E]."""
    if logits.device.type == "cpu":
        return route_sigmoid_grouped_reference(
            _final_logits(logits, lora, source_rows),
            correction_bias,
            top_k,
            num_groups=num_groups,
            top_k_groups=top_k_groups,
            renormalize=renormalize,
            scale=scale,
        )
    return route_rows(
        logits,
        lora,
        source_rows,
        correction_bias,
        top_k,
        sigmoid=True,
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        renormalize=renormalize,
        scale=scale,
    )


def route_softmax_grouped(
    logits: torch.Tensor | LogitParts,
    top_k: int,
    *,
    num_groups: int,
    top_k_groups: int,
    scale: float,
    lora: RouterLora | None = None,
    source_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `route_softmax_grouped_reference`; `logits` [T, E]."""
    if logits.device.type == "cpu":
        logits = _final_logits(logits, lora, source_rows)
        return route_softmax_grouped_reference(
            logits, top_k, num_groups=num_groups, top_k_groups=top_k_groups, scale=scale
        )
    return route_rows(
        logits,
        lora,
        source_rows,
        None,
        top_k,
        sigmoid=False,
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        scale=scale,
    )


def route_sigmoid(
    logits: torch.Tensor | LogitParts,
    top_k: int,
    *,
    lora: RouterLora | None = None,
    source_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `route_sigmoid_reference`; `logits` [T, E]."""
    if logits.device.type == "cpu":
        return route_sigmoid_reference(_final_logits(logits, lora, source_rows), top_k)
    return route_rows(logits, lora, source_rows, None, top_k, sigmoid=True)
