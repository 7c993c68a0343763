"""Make tokens that a request has seen less, or more, likely, in place.

    x = x / repetition where x > 0, else x * repetition       tokens of the prompt or the output
    x = x - frequency * count - presence                      tokens of the output

in this order, as vLLM and (the second line) OpenAI define them. Counts are a row of `counts` for each request
that has penalties, kept on the device from step to step: a list of a request's tokens would have to be made
unique and copied again in every step, at the length of its context.

Shapes: logits [B, V] float32, changed in the N given rows; counts [P, V] int32, twice the count in the
output, plus 1 for a token of the prompt; rows and slots [N] int64, of logits and of counts; penalties [N]
float32.
int32, since a context may hold one token more often than 32,767 times.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

IN_PROMPT = 1
IN_OUTPUT = 2
_BLOCK = 2048


@dataclass(frozen=True, slots=True)
class Penalties:
    """The rows that have penalties, on the logits' device."""

    counts: torch.Tensor  # [P, V] int32
    rows: torch.Tensor  # [N] int64
    slots: torch.Tensor  # [N] int64
    repetition: torch.Tensor  # [N] float32, 1 changes nothing
    frequency: torch.Tensor  # [N] float32
    presence: torch.Tensor  # [N] float32


def penalize_reference(logits: torch.Tensor, penalties: Penalties) -> None:
    """See `penalize`."""
    counts = penalties.counts[penalties.slots]
    num_output = counts // IN_OUTPUT
    x = logits[penalties.rows]
    repetition = penalties.repetition.unsqueeze(1)
    x = torch.where(counts > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    x -= penalties.frequency.unsqueeze(1) * num_output
    x -= penalties.presence.unsqueeze(1) * (num_output > 0)
    logits[penalties.rows] = x


@triton.jit(do_not_specialize=["vocab", "stride"])
def _penalize_kernel(
    logits_ptr, counts_ptr, rows_ptr, slots_ptr, repetition_ptr, frequency_ptr, presence_ptr, vocab, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    at = logits_ptr + tl.load(rows_ptr + index) * stride + token
    count = tl.load(counts_ptr + tl.load(slots_ptr + index) * vocab + token, mask=inside, other=0)
    num_output = count >> 1
    x = tl.load(at, mask=inside & (count > 0), other=0.0)
    repetition = tl.load(repetition_ptr + index)
    x = tl.where(x > 0, x / repetition, x * repetition)
    x -= tl.load(frequency_ptr + index) * num_output.to(tl.float32)
    x -= tl.where(num_output > 0, tl.load(presence_ptr + index), 0.0)
    tl.store(at, x, mask=inside & (count > 0))


def penalize(logits: torch.Tensor, penalties: Penalties) -> None:
    """Apply the penalties in place; rows that are not named, and tokens not seen, stay as they are."""
    if logits.dtype != torch.float32 or penalties.counts.dtype != torch.int32:
        raise ValueError(
            f"penalize: float32 logits and int32 counts, not {logits.dtype}, {penalties.counts.dtype}"
        )
    if logits.shape[-1] != penalties.counts.shape[-1]:
        raise ValueError(
            f"penalize: counts {tuple(penalties.counts.shape)} do not fit logits {tuple(logits.shape)}"
        )
    if logits.device.type == "cpu" or logits.stride(1) != 1 or not penalties.counts.is_contiguous():
        penalize_reference(logits, penalties)
    else:
        penalize_rows(logits, penalties)


def penalize_rows(logits: torch.Tensor, penalties: Penalties) -> None:
    """The kernel, for rows whose tokens lie side by side."""
    vocab = logits.shape[1]
    if not penalties.rows.numel():
        return
    _penalize_kernel[(penalties.rows.numel(), triton.cdiv(vocab, _BLOCK))](
        logits, penalties.counts, penalties.rows, penalties.slots, penalties.repetition,
        penalties.frequency, penalties.presence, vocab, logits.stride(0),
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
