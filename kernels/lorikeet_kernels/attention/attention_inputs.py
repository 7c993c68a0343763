"""Between the fused projection and attention: head norm, rotation and the cache write in one launch.

    q, k, v -> q, k, v + delta            (where a delta is given: what adapters add)
    q, k -> rotary(head_norm(q, k)), or head_norm(rotary(q, k)) where `norms_rotated`
    q -> q * factors[position];  q in place, k and v into the cache at slot_mapping[t]

Shapes: heads [T, Hq + 2 Hkv, D] contiguous, queries first, then keys, then values; delta likewise, float32;
norm_weight [Hq + Hkv, D]; positions [T] int64; table [P, 2, half] float32, whose pairs are neighbours where
`interleaved`; factors [P] float32; key_cache, value_cache [blocks, block_tokens, Hkv, D] of heads' dtype, or
FP8 with `scales`; slot_mapping [T] int64. Rounds the sum, where `head_norm`, `rotary` and `kv_write` round,
and after the factor; k and v in `heads` are left as they were.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from functools import partial

import torch
import triton
import triton.language as tl

from lorikeet_kernels.attention.head_norm import head_norm_reference
from lorikeet_kernels.attention.kv_scales import KvScales, check_scales
from lorikeet_kernels.attention.kv_write import kv_write_reference
from lorikeet_kernels.attention.rotary import rotary_reference, rotated

# Measured on an H200, 80 heads of 64: 64 tokens take 1.8 us with 8 heads a program and 2.0 with 32, 4096
# tokens 52.6 and 22.3.
FEW_TOKENS, FEW_HEADS, MANY_HEADS = 256, 8, 32


def heads_per_program(num_tokens: int) -> int:
    """Heads that one program takes: a small batch lacks programs, a large one has too many."""
    return FEW_HEADS if num_tokens <= FEW_TOKENS else MANY_HEADS


def attention_inputs_reference(
    heads: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    positions: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    interleaved: bool = False,
    norms_rotated: bool = False,
    factors: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
    scales: KvScales | None = None,
) -> torch.Tensor:
    """See `attention_inputs`; k and v in `heads` are overwritten here."""
    if delta is not None:
        heads.copy_(heads.float() + delta)
    kv_heads = key_cache.shape[2]
    num_rotated = heads.shape[1] - kv_heads
    if norm_weight is not None and not norms_rotated:
        head_norm_reference(heads[:, :num_rotated], norm_weight, eps)
    if table is not None and positions is not None:
        rotary_reference(heads[:, :num_rotated], positions, table, interleaved=interleaved)
    if norm_weight is not None and norms_rotated:
        head_norm_reference(heads[:, :num_rotated], norm_weight, eps)
    q, k, v = heads.split((num_rotated - kv_heads, kv_heads, kv_heads), dim=1)
    if factors is not None and positions is not None:
        q.copy_(q.float() * factors.index_select(0, positions).view(-1, 1, 1))
    kv_write_reference(k, v, key_cache, value_cache, slot_mapping, scales=scales)
    return q


@triton.jit
def _normed(
    a, b, rest, weight_at, i, j, is_half, is_rest, changes, eps,
    DIM: tl.constexpr, REST: tl.constexpr, STEP: tl.constexpr, SECOND: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The heads normed where `changes`."""
    dtype = a.dtype
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    square = tl.sum(wide_a * wide_a, axis=1) + tl.sum(wide_b * wide_b, axis=1)
    if REST > 0:
        square += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), axis=1)
    scale = (1.0 / tl.sqrt(square / DIM + eps))[:, None]
    half = is_half & changes
    weight_a = tl.load(weight_at + i[None, :] * STEP, mask=half, other=0.0).to(tl.float32)
    weight_b = tl.load(weight_at + i[None, :] * STEP + SECOND, mask=half, other=0.0).to(tl.float32)
    a = tl.where(changes, (wide_a * scale * weight_a).to(dtype), a)
    b = tl.where(changes, (wide_b * scale * weight_b).to(dtype), b)
    if REST > 0:
        weight_at += 2 * HALF
        weight_rest = tl.load(weight_at + j[None, :], mask=is_rest & changes, other=0.0).to(tl.float32)
        rest = tl.where(changes, (rest.to(tl.float32) * scale * weight_rest).to(dtype), rest)
    return a, b, rest


@triton.jit
def _to_fp8(x, scale):
    y = tl.minimum(tl.maximum(x.to(tl.float32) / scale, -448.0), 448.0)
    return y.to(tl.float8e4nv)


@triton.jit
def _attention_inputs_kernel(
    heads_ptr, delta_ptr, weight_ptr, positions_ptr, table_ptr, factors_ptr, key_ptr, value_ptr,
    key_scales_ptr, value_scales_ptr, slots_ptr, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_P2: tl.constexpr, REST: tl.constexpr, REST_P2: tl.constexpr, STEP: tl.constexpr,
    SECOND: tl.constexpr, NORM: tl.constexpr, NORMS_ROTATED: tl.constexpr, ROTATE: tl.constexpr,
    TEMPERATURE: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_SCALES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A head is pairs, element i * STEP and one SECOND behind it, and a rest of REST that is not rotated."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    ROTATED: tl.constexpr = Q_HEADS + KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, HALF_P2)
    j = tl.arange(0, REST_P2)
    is_head = head < ROTATED + KV_HEADS
    is_half = is_head[:, None] & (i < HALF)[None, :]
    is_rest = is_head[:, None] & (j < REST)[None, :]
    row_at = (token * (ROTATED + KV_HEADS) + head)[:, None] * DIM
    at = heads_ptr + row_at
    first = i[None, :] * STEP
    a = tl.load(at + first, mask=is_half, other=0.0)
    b = tl.load(at + first + SECOND, mask=is_half, other=0.0)
    dtype = a.dtype
    rest = a
    if REST > 0:
        rest = tl.load(at + 2 * HALF + j[None, :], mask=is_rest, other=0.0)
    if HAS_DELTA:
        added = delta_ptr + row_at
        a = (a.to(tl.float32) + tl.load(added + first, mask=is_half, other=0.0)).to(dtype)
        b = (b.to(tl.float32) + tl.load(added + first + SECOND, mask=is_half, other=0.0)).to(dtype)
        if REST > 0:
            more = tl.load(added + 2 * HALF + j[None, :], mask=is_rest, other=0.0)
            rest = (rest.to(tl.float32) + more).to(dtype)
    changes = (head < ROTATED)[:, None]
    weight_at = weight_ptr + head[:, None] * DIM
    if NORM and not NORMS_ROTATED:
        a, b, rest = _normed(
            a, b, rest, weight_at, i, j, is_half, is_rest, changes, eps, DIM, REST, STEP, SECOND, HALF
        )
    position = tl.load(positions_ptr + token)  # of no use, but valid, without a table and factors
    if ROTATE:
        row = table_ptr + position * (2 * HALF)
        cos = tl.load(row + i, mask=i < HALF, other=0.0)[None, :]
        sin = tl.load(row + HALF + i, mask=i < HALF, other=0.0)[None, :]
        turned_a, turned_b = rotated(a, b, cos, sin)
        a, b = tl.where(changes, turned_a, a), tl.where(changes, turned_b, b)
    if NORM and NORMS_ROTATED:
        a, b, rest = _normed(
            a, b, rest, weight_at, i, j, is_half, is_rest, changes, eps, DIM, REST, STEP, SECOND, HALF
        )
    is_query = (head < Q_HEADS)[:, None]
    if TEMPERATURE:
        factor = tl.load(factors_ptr + position)
        a = tl.where(is_query, (a.to(tl.float32) * factor).to(dtype), a)
        b = tl.where(is_query, (b.to(tl.float32) * factor).to(dtype), b)
        if REST > 0:
            rest = tl.where(is_query, (rest.to(tl.float32) * factor).to(dtype), rest)
    slot = tl.load(slots_ptr + token)
    # keys and values go to the cache, queries back where they were
    of_key = head - Q_HEADS
    cache = tl.where((head < ROTATED)[:, None], key_ptr, value_ptr)
    cache_head = tl.where(head < ROTATED, of_key, of_key - KV_HEADS)
    place = (slot * KV_HEADS + cache_head)[:, None] * DIM
    if HAS_SCALES:
        tl.store(at + first, a, mask=is_half & is_query)
        tl.store(at + first + SECOND, b, mask=is_half & is_query)
        scales = tl.where(head < ROTATED, key_scales_ptr, value_scales_ptr)
        is_cached = is_head & (head >= Q_HEADS)
        scale = tl.load(scales + cache_head, mask=is_cached, other=1.0)[:, None]
        tl.store(cache + place + first, _to_fp8(a, scale), mask=is_half & is_cached[:, None])
        tl.store(cache + place + first + SECOND, _to_fp8(b, scale), mask=is_half & is_cached[:, None])
        if REST > 0:
            tl.store(at + 2 * HALF + j[None, :], rest, mask=is_rest & is_query)
            to = cache + place + 2 * HALF + j[None, :]
            tl.store(to, _to_fp8(rest, scale), mask=is_rest & is_cached[:, None])
    else:
        to = tl.where(is_query, at, cache + place)
        tl.store(to + first, a, mask=is_half)
        tl.store(to + first + SECOND, b, mask=is_half)
        if REST > 0:
            tl.store(to + 2 * HALF + j[None, :], rest, mask=is_rest)


def attention_inputs(
    heads: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    positions: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    interleaved: bool = False,
    norms_rotated: bool = False,
    factors: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
    delta_is_joined: bool = False,
    scales: KvScales | None = None,
) -> torch.Tensor:
    """Prepare the queries in place, write keys and values into the caches, and return the queries' view.

    `delta_is_joined` where one launch made heads and delta.
    """
    num_heads, dim = heads.shape[1:]
    kv_heads = key_cache.shape[2]
    if key_cache.shape != value_cache.shape or key_cache.shape[3] != dim or not heads.is_contiguous():
        raise ValueError(
            f"attention_inputs: heads {tuple(heads.shape)}, contiguous, do not fit caches "
            f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if norm_weight is not None and norm_weight.shape != (num_heads - kv_heads, dim):
        raise ValueError(f"attention_inputs: norm weight {tuple(norm_weight.shape)} does not fit the heads")
    if positions is None and (table is not None or factors is not None):
        raise ValueError("attention_inputs: a table and factors need positions")
    if table is not None and 2 * table.shape[-1] > dim:
        raise ValueError(f"attention_inputs: table {tuple(table.shape)} does not fit heads of {dim}")
    if delta is not None and (
        delta.shape != heads.shape or delta.dtype != torch.float32 or not delta.is_contiguous()
    ):
        raise ValueError(
            f"attention_inputs: delta {delta.dtype} {tuple(delta.shape)} is not contiguous float32 like heads"
        )
    check_scales("attention_inputs", key_cache, value_cache, scales)
    launch = attention_inputs_reference
    if heads.device.type != "cpu":
        launch = partial(prepare_heads, delta_is_joined=delta_is_joined)
    return launch(
        heads, key_cache, value_cache, slot_mapping, norm_weight=norm_weight, eps=eps, positions=positions,
        table=table, interleaved=interleaved, norms_rotated=norms_rotated, factors=factors, delta=delta,
        scales=scales,
    )  # fmt: skip


def prepare_heads(
    heads: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    positions: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    interleaved: bool = False,
    norms_rotated: bool = False,
    factors: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
    delta_is_joined: bool = False,
    scales: KvScales | None = None,
) -> torch.Tensor:
    """Launch; `attention_inputs` on a GPU, and what the interpreter tests.

    A delta that is not of the launch before comes from another stream, after whose join a launch waits for
    what is before it in any case.
    """
    num_tokens, num_heads, dim = heads.shape
    kv_heads = key_cache.shape[2]
    half = dim // 2 if table is None else table.shape[-1]
    rest = dim - 2 * half
    pdl = heads.device.type == "cuda"
    block = heads_per_program(num_tokens)
    if num_tokens > 0:
        _attention_inputs_kernel[(num_tokens, triton.cdiv(num_heads, block))](
            heads, heads if delta is None else delta, heads if norm_weight is None else norm_weight,
            slot_mapping if positions is None else positions, heads if table is None else table,
            heads if factors is None else factors, key_cache, value_cache,
            heads if scales is None else scales.keys, heads if scales is None else scales.values,
            slot_mapping, eps,
            Q_HEADS=num_heads - 2 * kv_heads, KV_HEADS=kv_heads, DIM=dim, HALF=half,
            HALF_P2=triton.next_power_of_2(half), REST=rest, REST_P2=triton.next_power_of_2(max(1, rest)),
            STEP=2 if interleaved else 1, SECOND=1 if interleaved else half,
            NORM=norm_weight is not None, NORMS_ROTATED=norms_rotated, ROTATE=table is not None,
            TEMPERATURE=factors is not None, HAS_DELTA=delta is not None, HAS_SCALES=scales is not None,
            BLOCK=block, PDL=pdl, num_warps=2,
            **({"launch_pdl": True} if pdl and (delta is None or delta_is_joined) else {}),
        )  # fmt: skip
    return heads[:, : num_heads - 2 * kv_heads]
