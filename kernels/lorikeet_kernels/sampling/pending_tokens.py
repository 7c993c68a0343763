"""Token ids of a step of which some are known on the device only: the step before sampled them.

    y[t] = ids[t]                            where ids[t] >= 0
    y[t] = max(sampled[-1 - ids[t]], 0)      else

So the host names a place in `sampled` where it does not know the token yet. A place that holds no token
(NO_TOKEN, its request is about to end) gives token 0, which every vocabulary has.

Shapes: ids [T] int64, sampled [P] int64, result [T] int64.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl

_BLOCK = 256


def pending_tokens_reference(ids: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """See `pending_tokens`."""
    known = sampled.index_select(0, (-1 - ids).clamp_(min=0)).clamp_(min=0)
    return torch.where(ids < 0, known, ids)


@triton.jit(do_not_specialize=["num_tokens"])
def _pending_tokens_kernel(out_ptr, ids_ptr, sampled_ptr, num_tokens, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_tokens
    token = tl.load(ids_ptr + i, mask=inside, other=0)
    is_pending = token < 0
    sampled = tl.load(sampled_ptr + (-1 - token), mask=is_pending, other=0)
    tl.store(out_ptr + i, tl.where(is_pending, tl.maximum(sampled, 0), token), mask=inside)


def pending_tokens(ids: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """Return the token ids, a new tensor."""
    if ids.dtype != torch.int64 or sampled.dtype != torch.int64 or ids.dim() != 1 or sampled.dim() != 1:
        raise ValueError(
            f"pending_tokens: pass int64 vectors, not ids {ids.dtype} {tuple(ids.shape)} and sampled "
            f"{sampled.dtype} {tuple(sampled.shape)}"
        )
    return pending_tokens_reference(ids, sampled) if ids.device.type == "cpu" else read_pending(ids, sampled)


def read_pending(ids: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """The kernel's launch, on any device that Triton runs on."""
    out = torch.empty_like(ids)
    if ids.shape[0] > 0:
        _pending_tokens_kernel[(triton.cdiv(ids.shape[0], _BLOCK),)](
            out, ids, sampled, ids.shape[0], BLOCK=_BLOCK, num_warps=4
        )
    return out
