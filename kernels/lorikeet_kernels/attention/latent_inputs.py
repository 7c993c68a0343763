"""Between latent attention's projections and its scores: norm, rotation and the cache write in one launch.

    l = rms_norm(latent);  k = rotary(key);  cache[slot] = (l | k);  q's last elements -> rotary(q's last)

Shapes: q [T, H, plain + rope], a view is fine; latent [T, latent] and key [T, rope], views of one projection;
absorbed [T, H, latent + rope], whose last `rope` elements get the rotated queries; cache [blocks,
block_tokens, 1, latent + rope], contiguous; slot_mapping and positions [T] int64; table [P, 2, rope / 2]
float32; weight [latent]. q and key are rotated in place; returned is l [T, latent]. With `interleaved` the
rotation pairs neighbours. Rounds where `rms_norm` and `rotary` round.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from lorikeet_kernels.attention.rotary import rotary_reference
from lorikeet_kernels.dense.rms_norm import rms_norm_reference

HEADS_PER_PROGRAM = 16


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
) -> torch.Tensor:
    """See `latent_inputs`."""
    rope_dim = key.shape[-1]
    normed = rms_norm_reference(latent, weight, eps)
    turned = q[..., q.shape[-1] - rope_dim :]
    rotary_reference(turned, positions, table, interleaved=interleaved)
    rotary_reference(key.unsqueeze(1), positions, table, interleaved=interleaved)
    absorbed[..., absorbed.shape[-1] - rope_dim :] = turned
    cache.flatten(0, 2).index_copy_(0, slot_mapping, torch.cat((normed, key), dim=1))
    return normed


@triton.jit
def _rotated(at, row, inside, HALF: tl.constexpr, HALF_P2: tl.constexpr, INTERLEAVED: tl.constexpr):
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
    cos = tl.load(row + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(row + HALF + i, mask=i < HALF, other=0.0)[None, :]
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    turned_a = (wide_a * cos - wide_b * sin).to(a.dtype)
    turned_b = (wide_b * cos + wide_a * sin).to(a.dtype)
    return turned_a, turned_b, first, second, mask


@triton.jit
def _latent_inputs_kernel(
    q_ptr, latent_ptr, key_ptr, absorbed_ptr, normed_ptr, cache_ptr, slots_ptr, positions_ptr, table_ptr,
    weight_ptr, stride_qt, stride_lt, eps,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, LATENT: tl.constexpr, LATENT_P2: tl.constexpr,
    ROPE: tl.constexpr, HALF_P2: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
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
        at = q_ptr + token * stride_qt + head[:, None] * (PLAIN + ROPE) + PLAIN
        a, b, first, second, mask = _rotated(at, row, head < HEADS, HALF, HALF_P2, INTERLEAVED)
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
        wide = x.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / LATENT + eps)
        weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
        y = (wide * scale * weight).to(x.dtype)
        tl.store(normed_ptr + token * LATENT + d, y, mask=inside)
        tl.store(cached + d, y, mask=inside)
        one = tl.arange(0, 1)
        key_at = key_ptr + token * stride_lt + one[:, None]
        key_a, key_b, left, right, is_key = _rotated(key_at, row, one == 0, HALF, HALF_P2, INTERLEAVED)
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
) -> torch.Tensor:
    """Prepare the queries and write the latents into the cache; return the normed latents."""
    width = latent.shape[-1] + key.shape[-1]
    if cache.shape[2:] != (1, width) or absorbed.shape != (*q.shape[:2], width):
        raise ValueError(
            f"latent_inputs: a latent of {latent.shape[-1]} and a key of {key.shape[-1]} elements do not fit "
            f"cache {tuple(cache.shape)} and absorbed queries {tuple(absorbed.shape)}"
        )
    if 2 * table.shape[-1] != key.shape[-1]:
        raise ValueError(f"latent_inputs: table {tuple(table.shape)} does not fit keys {tuple(key.shape)}")
    where = (q, latent, key, absorbed, cache, slot_mapping, positions, table, weight, eps)
    if q.device.type == "cpu":
        return latent_inputs_reference(*where, interleaved=interleaved)
    return prepare_latents(*where, interleaved=interleaved)


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
) -> torch.Tensor:
    """Launch; `latent_inputs` on a GPU, and what the interpreter tests."""
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
    normed = torch.empty((num_tokens, latent_dim), dtype=q.dtype, device=q.device)
    pdl = q.device.type == "cuda"
    if num_tokens > 0:
        _latent_inputs_kernel[(num_tokens, 1 + triton.cdiv(heads, HEADS_PER_PROGRAM))](
            q, latent, key, absorbed, normed, cache, slot_mapping, positions, table, weight,
            q.stride(0), latent.stride(0), eps,
            HEADS=heads, PLAIN=dim - rope_dim, LATENT=latent_dim,
            LATENT_P2=triton.next_power_of_2(latent_dim), ROPE=rope_dim,
            HALF_P2=triton.next_power_of_2(rope_dim // 2), INTERLEAVED=interleaved, BLOCK=HEADS_PER_PROGRAM,
            PDL=pdl, num_warps=2, **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return normed
