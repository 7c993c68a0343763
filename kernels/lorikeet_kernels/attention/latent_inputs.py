"""Between latent attention's projections and its scores: norm, rotation and the cache write in one launch.

    q -> q + query_delta;  (latent | key) -> (latent | key) + delta        (where given: what adapters add)
    l = rms_norm(latent);  k = rotary(key);  cache[slot] = (l | k);  q's last elements -> rotary(q's last)

Shapes: q [T, H, plain + rope], a view is fine; latent [T, latent] and key [T, rope], views of one projection;
query_delta and delta [T, latent + rope] float32, with the strides of what they are added to; absorbed [T, H,
latent + rope], whose last `rope` elements get the rotated queries; cache [blocks, block_tokens, 1, latent +
rope], contiguous; slot_mapping and positions [T] int64; table [P, 2, rope / 2] float32; weight [latent]. q
and key are changed in place; returned is l [T, latent]. With `interleaved` the rotation pairs neighbours.
Rounds the sums, and where `rms_norm` and `rotary` round.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from lorikeet_kernels.attention.rotary import rotary_reference, rotated
from lorikeet_kernels.dense.rms_norm import rms_norm_reference

HEADS_PER_PROGRAM = 16
HEADS_WITH_DELTA = 4  # whose plain elements pass through, too


def latent_inputs_reference(
    q: torch.Tensor,
    latent: torch.Tensor,
    key: torch.Tensor,
    absorbed: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    interleaved: bool,
    query_delta: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `latent_inputs`."""
    rope_dim = key.shape[-1]
    if query_delta is not None:
        q.copy_(q.float() + query_delta)
    if delta is not None:
        latent = (latent.float() + delta[:, :-rope_dim]).to(latent.dtype)
        key.copy_(key.float() + delta[:, -rope_dim:])
    normed = rms_norm_reference(latent, weight, eps)
    turned = q[..., q.shape[-1] - rope_dim :]
    rotary_reference(turned, positions, table, interleaved=interleaved)
    rotary_reference(key.unsqueeze(1), positions, table, interleaved=interleaved)
    absorbed[..., absorbed.shape[-1] - rope_dim :] = turned
    cache.flatten(0, 2).index_copy_(0, slot_mapping, torch.cat((normed, key), dim=1))
    return normed


@triton.jit
def _rotated_pairs(
    at, delta_at, row, inside, HALF: tl.constexpr, HALF_P2: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):  # fmt: skip
    """(first, second, their offsets) of the pairs at `at` [N, 1], turned by the table's `row`."""
    i = tl.arange(0, HALF_P2)
    if INTERLEAVED:
        first = 2 * i[None, :]
        second = first + 1
    else:
        first = i[None, :]
        second = first + HALF
    mask = inside[:, None] & (i < HALF)[None, :]
    a = tl.load(at + first, mask=mask, other=0.0)
    b = tl.load(at + second, mask=mask, other=0.0)
    if HAS_DELTA:
        a = (a.to(tl.float32) + tl.load(delta_at + first, mask=mask, other=0.0)).to(a.dtype)
        b = (b.to(tl.float32) + tl.load(delta_at + second, mask=mask, other=0.0)).to(b.dtype)
    cos = tl.load(row + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(row + HALF + i, mask=i < HALF, other=0.0)[None, :]
    a, b = rotated(a, b, cos, sin)
    return a, b, first, second, mask


@triton.jit
def _latent_inputs_kernel(
    q_ptr, latent_ptr, key_ptr, absorbed_ptr, normed_ptr, cache_ptr, slots_ptr, positions_ptr, table_ptr,
    weight_ptr, query_delta_ptr, delta_ptr, stride_qt, stride_lt, eps,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, PLAIN_P2: tl.constexpr, LATENT: tl.constexpr,
    LATENT_P2: tl.constexpr, ROPE: tl.constexpr, HALF_P2: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_QUERY_DELTA: tl.constexpr, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first program of a token takes its latent and key, each further one BLOCK heads."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    HALF: tl.constexpr = ROPE // 2
    WIDTH: tl.constexpr = LATENT + ROPE
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = table_ptr + tl.load(positions_ptr + token) * ROPE
    if part > 0:
        head = (part - 1) * BLOCK + tl.arange(0, BLOCK)
        head_at = token * stride_qt + head[:, None] * (PLAIN + ROPE)
        if HAS_QUERY_DELTA:
            j = tl.arange(0, PLAIN_P2)[None, :]
            is_plain = (head < HEADS)[:, None] & (j < PLAIN)
            plain = tl.load(q_ptr + head_at + j, mask=is_plain, other=0.0)
            from_adapter = tl.load(query_delta_ptr + head_at + j, mask=is_plain, other=0.0)
            plain = (plain.to(tl.float32) + from_adapter).to(plain.dtype)
            tl.store(q_ptr + head_at + j, plain, mask=is_plain)
        at = q_ptr + head_at + PLAIN
        a, b, first, second, mask = _rotated_pairs(
            at, query_delta_ptr + head_at + PLAIN, row, head < HEADS, HALF, HALF_P2, INTERLEAVED,
            HAS_QUERY_DELTA,
        )  # fmt: skip
        tl.store(at + first, a, mask=mask)
        tl.store(at + second, b, mask=mask)
        to = absorbed_ptr + (token * HEADS + head)[:, None] * WIDTH + LATENT
        tl.store(to + first, a, mask=mask)
        tl.store(to + second, b, mask=mask)
    else:
        cached = cache_ptr + tl.load(slots_ptr + token) * WIDTH
        d = tl.arange(0, LATENT_P2)
        inside = d < LATENT
        x = tl.load(latent_ptr + token * stride_lt + d, mask=inside, other=0.0)
        if HAS_DELTA:
            added = tl.load(delta_ptr + token * stride_lt + d, mask=inside, other=0.0)
            x = (x.to(tl.float32) + added).to(x.dtype)
        wide = x.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / LATENT + eps)
        weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
        y = (wide * scale * weight).to(x.dtype)
        tl.store(normed_ptr + token * LATENT + d, y, mask=inside)
        tl.store(cached + d, y, mask=inside)
        one = tl.arange(0, 1)
        place = token * stride_lt + one[:, None]
        key_at = key_ptr + place
        key_a, key_b, left, right, is_key = _rotated_pairs(
            key_at, delta_ptr + place + LATENT, row, one == 0, HALF, HALF_P2, INTERLEAVED, HAS_DELTA
        )
        tl.store(key_at + left, key_a, mask=is_key)
        tl.store(key_at + right, key_b, mask=is_key)
        tl.store(cached + LATENT + left, key_a, mask=is_key)
        tl.store(cached + LATENT + right, key_b, mask=is_key)


def latent_inputs(
    q: torch.Tensor,
    latent: torch.Tensor,
    key: torch.Tensor,
    absorbed: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    interleaved: bool,
    query_delta: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
    delta_is_joined: bool = False,
) -> torch.Tensor:
    """Prepare the queries and write the latents into the cache; return the normed latents.

    `delta_is_joined` where the launch before made the queries and what is added to them.
    """
    width = latent.shape[-1] + key.shape[-1]
    if cache.shape[2:] != (1, width) or absorbed.shape != (*q.shape[:2], width):
        raise ValueError(
            f"latent_inputs: a latent of {latent.shape[-1]} and a key of {key.shape[-1]} elements do not fit "
            f"cache {tuple(cache.shape)} and absorbed queries {tuple(absorbed.shape)}"
        )
    _check_delta(query_delta, q, q.shape)
    _check_delta(delta, latent, torch.Size((latent.shape[0], width)))
    if 2 * table.shape[-1] != key.shape[-1]:
        raise ValueError(f"latent_inputs: table {tuple(table.shape)} does not fit keys {tuple(key.shape)}")
    where = (q, latent, key, absorbed, cache, slot_mapping, positions, table, weight, eps)
    if q.device.type == "cpu":
        return latent_inputs_reference(*where, interleaved=interleaved, query_delta=query_delta, delta=delta)
    return prepare_latents(
        *where, interleaved=interleaved, query_delta=query_delta, delta=delta, delta_is_joined=delta_is_joined
    )


def _check_delta(delta: torch.Tensor | None, rows: torch.Tensor, shape: torch.Size) -> None:
    if delta is None:
        return
    if delta.shape != shape or delta.dtype != torch.float32 or delta.stride() != rows.stride():
        raise ValueError(
            f"latent_inputs: a delta, {delta.dtype} {tuple(delta.shape)} {delta.stride()}, must be float32 "
            f"{tuple(shape)} with its rows' strides, {rows.stride()}"
        )


def prepare_latents(
    q: torch.Tensor,
    latent: torch.Tensor,
    key: torch.Tensor,
    absorbed: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    interleaved: bool,
    query_delta: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
    delta_is_joined: bool = False,
) -> torch.Tensor:
    """Launch; `latent_inputs` on a GPU, and what the interpreter tests.

    Deltas that are not of the launch before come from another stream, after whose join a launch waits for
    what is before it in any case.
    """
    num_tokens, heads, dim = q.shape
    latent_dim, rope_dim = latent.shape[-1], key.shape[-1]
    if (
        q.stride()[1:] != (dim, 1)
        or latent.stride() != key.stride()
        or latent.stride(1) != 1
        or not (cache.is_contiguous() and absorbed.is_contiguous())
    ):
        raise ValueError(
            f"latent_inputs: a row of q must be contiguous, its strides are {q.stride()}, and so must be the "
            f"cache and absorbed; latent and key must be parts of one tensor's rows, their strides are "
            f"{latent.stride()} and {key.stride()}"
        )
    block = HEADS_PER_PROGRAM if query_delta is None else HEADS_WITH_DELTA
    normed = torch.empty((num_tokens, latent_dim), dtype=q.dtype, device=q.device)
    pdl = q.device.type == "cuda"
    if num_tokens > 0:
        _latent_inputs_kernel[(num_tokens, 1 + triton.cdiv(heads, block))](
            q, latent, key, absorbed, normed, cache, slot_mapping, positions, table, weight,
            q if query_delta is None else query_delta, q if delta is None else delta, q.stride(0),
            latent.stride(0), eps,
            HEADS=heads, PLAIN=dim - rope_dim, PLAIN_P2=triton.next_power_of_2(dim - rope_dim),
            LATENT=latent_dim, LATENT_P2=triton.next_power_of_2(latent_dim), ROPE=rope_dim,
            HALF_P2=triton.next_power_of_2(rope_dim // 2), INTERLEAVED=interleaved,
            HAS_QUERY_DELTA=query_delta is not None, HAS_DELTA=delta is not None, BLOCK=block, PDL=pdl,
            num_warps=2,
            **({"launch_pdl": True} if pdl and (query_delta is None or delta_is_joined) else {}),
        )  # fmt: skip
    return normed
