"""Compile what a model's base ops can ever launch, before the first request. GPU only; once per process.

Tiles change with the number of tokens, requests or keys; everything else about a launch is the model's. So
one launch for each distinct choice covers all batches up to the given bounds.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import torch

from lorikeet_kernels.attention.attention_metadata import AttentionMetadata
from lorikeet_kernels.attention.kv_scales import KvScales
from lorikeet_kernels.attention.paged_attention import paged_attention
from lorikeet_kernels.dense.fp8_linear import fp8_linear
from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.dense.gated_activation import GatedActivation
from lorikeet_kernels.dense.linear import linear
from lorikeet_kernels.dense.quantize_rows import shares_rows
from lorikeet_kernels.experts.expert_blocks import cut_kind
from lorikeet_kernels.experts.moe_experts import ExpertProjection, ExpertsLora, experts_shape, moe_experts
from lorikeet_kernels.experts.moe_sum import SharedRows
from lorikeet_kernels.experts.router_logits import BLOCK_ROWS, router_in_parts
from lorikeet_kernels.experts.routing import RouterLora
from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.launch.hopper import is_hopper
from lorikeet_kernels.sampling.penalties import Penalties, penalize
from lorikeet_kernels.sampling.sample_rows import FEW_ROWS, sample_rows
from lorikeet_kernels.sampling.token_bitmask import num_mask_words, token_bitmask
from lorikeet_kernels.tiling import OpShape, is_ungrouped, select_pair
from lorikeet_kernels.tiling.attention_tiles import select_decode, visible_keys
from lorikeet_kernels.tiling.dense_tiles import MAX_OWN_ROWS, select_dense, select_lanes, uses_torch
from lorikeet_kernels.tiling.expert_tiles import select_experts
from lorikeet_kernels.tiling.few_rows_tiles import MAX_FEW_ROWS, select_few_rows


def warm_up_experts(
    gate_up: ExpertProjection,
    down: ExpertProjection,
    activation: GatedActivation,
    *,
    dtype: torch.dtype,
    top_k: int,
    max_tokens: int,
    lora: ExpertsLora | None = None,
    has_shared: bool = False,
    is_shared_gated: bool = False,
    batch_invariant: bool = False,
) -> int:
    """Launch each distinct kernel of a layer's experts; returns how many batches it took.

    With `lora` (whose segments are taken for their workspace and number of slots) also what a batch with
    adapters launches here; the LoRA ops have `warm_up`. A gated shared expert's rows are whole.
    """
    num_experts, num_rows, hidden = gate_up.weight.shape
    device = torch.device("cuda", torch.cuda.current_device())
    name = device_name(torch.empty(0, device=device))
    seen: set[object] = set()
    for num_tokens in range(1, max_tokens + 1):
        pairs = num_tokens * top_k
        tiles = select_experts(experts_shape(gate_up, down, pairs), name, batch_invariant=batch_invariant)
        sides = [lora.gate_up_side(num_tokens, gate_up.weight), lora.down_side(num_tokens)] if lora else []
        is_joined = isinstance(down.weight, Fp8Weight) and lora and num_tokens in lora.fp8_joined_down_rows
        choice = (
            tiles,
            cut_kind(pairs),
            num_tokens == 1,  # whose pairs need no cut
            num_tokens if is_joined else None,  # whose kernel is one for each number of pairs
            shares_rows(num_tokens, hidden),
            shares_rows(pairs, num_rows // 2),
            _lora_choice(lora, hidden, num_rows, num_experts, pairs, name),
            *(side is not None for side in sides),
        )
        if choice in seen:
            continue
        seen.add(choice)
        x = torch.zeros((num_tokens, hidden), dtype=dtype, device=device)
        ids = torch.zeros((num_tokens, top_k), dtype=torch.int32, device=device)
        ids += torch.arange(top_k, dtype=torch.int32, device=device)
        weights = torch.ones((num_tokens, top_k), dtype=torch.float32, device=device)
        for way in _lora_ways(lora):
            adapters = None if way is None else way.without_adapters(num_tokens)
            # where adapters run beside the base, the shared expert's do, too
            is_apart = way is not None and way.side is not None and not is_shared_gated
            delta = x.float() if is_apart else None
            moe_experts(
                x, weights, ids, gate_up, down, activation, lora=adapters,
                shared=SharedRows(x, delta) if has_shared else None, batch_invariant=batch_invariant,
            )  # fmt: skip
    return len(seen)


def warm_up_few_rows(
    weight: torch.Tensor, bias: torch.Tensor | None, *, dtype: torch.dtype, max_tokens: int
) -> int:
    """As `warm_up_experts`, for a dense projection of as many rows as the own kernel takes."""
    out_features, in_features = weight.shape
    name, count = device_name(weight), 0
    for num_tokens in range(1, min(max_tokens, MAX_FEW_ROWS) + 1):
        if select_few_rows(num_tokens, out_features, in_features, name) is not None:
            linear(torch.zeros((num_tokens, in_features), dtype=dtype, device=weight.device), weight, bias)
            count += 1
    return count


def warm_up_router(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Callable[..., object],
    adapters: Callable[[torch.Tensor], RouterLora],
    *,
    dtype: torch.dtype,
    max_tokens: int,
) -> int:
    """As `warm_up_experts`, for a router whose logits come in parts, and the routing of these.

    `adapters` says which ones rows [T, H] have.
    """
    count = 0
    for num_tokens in (1, BLOCK_ROWS + 1):
        x = torch.zeros((num_tokens, weight.shape[1]), dtype=dtype, device=weight.device)
        parts = router_in_parts(x, weight, bias) if num_tokens <= max_tokens else None
        if parts is None:
            continue
        count += 1
        rows = torch.zeros(num_tokens, dtype=torch.int64, device=weight.device)
        for lora, source_rows in product((None, adapters(x)), (None, rows)):
            routing(parts, lora=lora, source_rows=source_rows)
    return count


def warm_up_fp8_linear(
    weight: Fp8Weight, bias: torch.Tensor | None, *, dtype: torch.dtype, max_tokens: int
) -> int:
    """As `warm_up_experts`, for a dense projection in FP8."""
    out_features, in_features = weight.shape
    seen: set[object] = set()
    for num_tokens in range(1, max_tokens + 1):
        is_torch = uses_torch(
            num_tokens, out_features, in_features, weight.kind, on_hopper=is_hopper(weight.values)
        )
        lanes = select_lanes(num_tokens, out_features, in_features)
        is_few = num_tokens <= MAX_OWN_ROWS  # kernels of their own, with the same tiles too
        tiles = select_dense(num_tokens, out_features, in_features, weight.kind)
        own = (num_tokens, lanes) if lanes else (is_few, tiles)
        choice = shares_rows(num_tokens, in_features), is_torch or own
        if choice in seen:
            continue
        seen.add(choice)
        x = torch.zeros((num_tokens, in_features), dtype=dtype, device=weight.device)
        for batch_invariant in (False, True):
            fp8_linear(x, weight, bias, batch_invariant=batch_invariant)
    return len(seen)


def _lora_ways(lora: ExpertsLora | None) -> list[ExpertsLora | None]:
    """Without adapters; with them; and beside the base."""
    if lora is None:
        return [None]
    ways = [None, replace(lora, side=None)]
    return ways if lora.side is None else [*ways, lora]


def _lora_choice(
    lora: ExpertsLora | None, hidden: int, num_rows: int, num_experts: int, num_pairs: int, device: str
) -> object:
    """What the adapters of a batch change about the launches of `moe_experts`."""
    if lora is None or not is_ungrouped(num_pairs, num_experts, lora.segments.num_slots):
        return None if lora is None else "grouped"
    rank = lora.tables.max_rank
    return tuple(
        select_pair(OpShape(*shape, rank, num_pairs), device)
        for shape in (("gate_up", hidden, num_rows), ("down", num_rows // 2, hidden))
    )


def warm_up_attention(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    dtype: torch.dtype,
    num_heads: int,
    scale: float,
    max_requests: int,
    max_tokens: int,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    scales: KvScales | None = None,
) -> int:
    """Launch each distinct kernel of a layer's attention over its own caches, block 0; returns how many."""
    device = key_cache.device
    _, block_tokens, kv_heads, dim = key_cache.shape
    seen: set[object] = set()
    blocks = -(-max_tokens // block_tokens)
    for num_requests in range(1, max_requests + 1):
        width = 1
        while True:
            longest = visible_keys(width * block_tokens, window, chunk)
            tiles = select_decode(num_requests, kv_heads, dim, longest, dtype.itemsize)
            if tiles not in seen:
                # one request more with two queries, the first time: both kernels
                num_rows = num_requests + (1 if not seen else 0)
                seen.add(tiles)
                starts = torch.arange(num_requests + 1, dtype=torch.int32, device=device)
                starts[-1] = num_rows
                metadata = AttentionMetadata(
                    query_starts=starts,
                    sequence_lens=torch.full((num_requests,), 2, dtype=torch.int32, device=device),
                    block_tables=torch.zeros((num_requests, width), dtype=torch.int32, device=device),
                    slot_mapping=torch.zeros(0, dtype=torch.int64, device=device),
                    query_starts_host=(),
                    sequence_lens_host=(),
                )
                q = torch.zeros((num_rows, num_heads, dim), dtype=dtype, device=device)
                out = q.new_empty((num_rows, num_heads, value_cache.shape[3]))
                paged_attention(
                    q, key_cache, value_cache, metadata, scale, out,
                    window=window, chunk=chunk, sinks=sinks, scales=scales,
                )  # fmt: skip
            if width >= blocks:
                break
            width = min(2 * width, blocks)
    return len(seen)


def warm_up_sampling(vocab_size: int, dtype: torch.dtype, max_rows: int) -> None:
    """Launch each distinct kernel of sampling, also for logits that were changed, which are float32."""
    ones = torch.ones(max_rows, device="cuda")
    places = torch.zeros(max_rows, dtype=torch.int64, device="cuda")
    counts = torch.zeros((1, vocab_size), dtype=torch.int32, device="cuda")
    scores = torch.zeros((1, vocab_size), device="cuda")
    penalize(scores, Penalties(counts, places[:1], places[:1], ones[:1], ones[:1], ones[:1]))
    masks = torch.full((1, num_mask_words(vocab_size)), -1, dtype=torch.int32, device="cuda")
    token_bitmask(scores, masks, places[:1])
    for rows in {1, max_rows} if max_rows > FEW_ROWS else {1}:
        for logits_dtype in {dtype, torch.float32}:
            logits = torch.zeros((rows, vocab_size), dtype=logits_dtype, device="cuda")
            row = (logits, ones[:rows], ones[:rows] / 2, places[:rows], places[:rows])
            sample_rows(*row, all_greedy=True, any_top_p=False)
            for any_top_p, any_top_k, any_min_p in product((False, True), repeat=3):
                sample_rows(
                    *row,
                    all_greedy=False,
                    any_top_p=any_top_p,
                    top_k=places[:rows] + 1 if any_top_k else None,
                    min_p=ones[:rows] / 2 if any_min_p else None,
                )
