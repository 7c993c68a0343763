"""Mask the logits of tokens that may not come next, in place.

    x[rows[i], t] = -inf    where bit t % 32 of masks[i, t // 32] is 0

The layout is that of llguidance and xgrammar. What is not masked keeps its bits; so do rows that are not
named.

Shapes: logits [B, V] float32, bfloat16 or float16, changed in the N given rows; masks [N, ceil(V / 32)]
int32; rows [N] int64, each once.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl

_BLOCK = 4096


def num_mask_words(vocab_size: int) -> int:
    """Words of a row of masks."""
    return -(-vocab_size // 32)


def token_bitmask_reference(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor) -> None:
    """See `token_bitmask`."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = ((masks.unsqueeze(-1) >> bits) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))


@triton.jit(do_not_specialize=["vocab", "stride", "num_words"])
def _token_bitmask_kernel(logits_ptr, masks_ptr, rows_ptr, vocab, stride, num_words, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    # 32 neighbours read the same word: one line of cache for a thousand tokens.
    word = tl.load(masks_ptr + index * num_words + token // 32, mask=inside, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    at = logits_ptr + tl.load(rows_ptr + index) * stride + token
    tl.store(at, float("-inf"), mask=inside & forbidden)


def token_bitmask(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor) -> None:
    """Apply the masks in place.

    Raises:
        ValueError: the masks do not fit the logits.
    """
    shape = (rows.numel(), num_mask_words(logits.shape[-1]))
    if masks.dtype != torch.int32 or tuple(masks.shape) != shape:
        raise ValueError(
            f"token_bitmask: int32 masks {shape} belong to logits {tuple(logits.shape)} and "
            f"{rows.numel()} rows, not {masks.dtype} {tuple(masks.shape)}"
        )
    if logits.device.type == "cpu" or logits.stride(1) != 1 or not masks.is_contiguous():
        token_bitmask_reference(logits, masks, rows)
    else:
        token_bitmask_rows(logits, masks, rows)


def token_bitmask_rows(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor) -> None:
    """The kernel, for rows whose tokens lie side by side."""
    vocab = logits.shape[1]
    if not rows.numel():
        return
    _token_bitmask_kernel[(rows.numel(), triton.cdiv(vocab, _BLOCK))](
        logits, masks, rows, vocab, logits.stride(0), masks.shape[1], BLOCK=_BLOCK, num_warps=4
    )
