"""Choose one token a row.

    greedy (temperature 0):  argmax of the logits, the lower id of equals
    else:                    argmax_v p_v / e_v,   p = softmax(logits / temperature) cut to min_p, then top_k,
                             then top_p,   e_v exponential noise, a hash of (seed, position, v)

which draws v with probability p_v. min_p keeps what is at least min_p times as likely as the most likely
token; top_p the smallest set, most likely first, whose share of what the others left reaches it. The noise
counts instead of streaming, so a token depends on its request's seed and position and its logits only: not on
the batch, not on steps before, not on whether the request was preempted between.
A row whose largest logit is not finite (NaN anywhere, or an overflow) has no distribution: NO_TOKEN.

Shapes: logits [B, V] any float dtype; parameters [B]; result [B] int64. All arithmetic is float32.
"""

from dataclasses import dataclass

import torch

from lorikeet_kernels.sampling.sample_rows import sample_rows

_MASK32 = 0xFFFFFFFF
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows' parameters, on the logits' device; the flags let work be skipped without a sync."""

    temperature: torch.Tensor  # [B] float32, 0 is greedy
    top_k: torch.Tensor  # [B] int64, 0 keeps all
    top_p: torch.Tensor  # [B] float32, 1 keeps all
    seed: torch.Tensor  # [B] int64
    position: torch.Tensor  # [B] int64, index of the sampled token in its sequence
    all_greedy: bool
    any_cut: bool  # some row has top_k or top_p
    any_top_k: bool = True  # some row may have top_k
    any_top_p: bool = True  # some row may have top_p
    min_p: torch.Tensor | None = None  # [B] float32, 0 keeps all; None: no row has it


def sample_reference(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """See `sample`."""
    logits = logits.float()
    highest = logits.amax(dim=-1, keepdim=True)  # NaN where any logit is
    is_finite = highest.squeeze(1).isfinite()
    greedy = torch.where(is_finite, logits.argmax(dim=-1), NO_TOKEN)
    if batch.all_greedy:
        return greedy
    is_greedy = batch.temperature == 0
    # The maximum is taken off first: a tiny temperature then gives 0 and -inf, never inf - inf.
    scaled = logits - highest
    scaled /= torch.where(is_greedy, 1.0, batch.temperature).unsqueeze(1)
    if batch.min_p is not None:
        scaled.masked_fill_(scaled.exp() < batch.min_p.unsqueeze(1), float("-inf"))
    p = _cut(scaled, batch) if batch.any_cut else torch.softmax(scaled, dim=-1)
    drawn = (p / exponential_noise(batch.seed, batch.position, logits.shape[-1])).argmax(dim=-1)
    return torch.where(is_greedy | ~is_finite, greedy, drawn)


def _cut(scaled: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Probabilities after top_k and top_p; they need not sum to 1."""
    values, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    top_k = torch.where(batch.top_k == 0, scaled.shape[-1], batch.top_k).unsqueeze(1)
    p = torch.softmax(values.masked_fill(rank >= top_k, float("-inf")), dim=-1)
    before = p.cumsum(dim=-1) - p
    # Rounding lets `before` pass 1 in a long tail, which top_p = 1 must not cut.
    top_p = torch.where(batch.top_p >= 1, float("inf"), batch.top_p).unsqueeze(1)
    p = p.masked_fill((before >= top_p) & (rank > 0), 0.0)
    return torch.zeros_like(p).scatter_(-1, ids, p)


def exponential_noise(seed: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard exponential variates [B, V], a pure function of (seed, position, token)."""
    low, high = seed & _MASK32, (seed >> 32) & _MASK32
    key = _mix(_mix(low) ^ high)
    key = (_mix(key ^ (position & _MASK32)) + position * 0x9E3779B1) & _MASK32
    token = torch.arange(vocab_size, device=seed.device)
    h = _mix((_mix(token ^ key.unsqueeze(1)) + _mix(low ^ 0x5BD1E995).unsqueeze(1)) & _MASK32)
    # Small variates decide; -log1p(-u) keeps all 32 bits near 0, where -log(u) of float32 has 24.
    u = (h.double() + 0.5).mul_(2.0**-32).float()
    return torch.log1p(-u).neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit integer hash of low bias ("lowbias32"); int64 holds the words."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Return the chosen token ids, NO_TOKEN for rows that have no distribution."""
    if logits.dim() != 2 or batch.temperature.shape != logits.shape[:1]:
        raise ValueError(
            f"sample: parameters {tuple(batch.temperature.shape)} do not fit logits {tuple(logits.shape)}"
        )
    if logits.device.type == "cpu" or logits.stride(1) != 1:
        return sample_reference(logits, batch)
    return sample_rows(
        logits,
        batch.temperature,
        batch.top_p,
        batch.seed,
        batch.position,
        all_greedy=batch.all_greedy,
        any_top_p=batch.any_cut and batch.any_top_p,
        top_k=batch.top_k if batch.any_cut and batch.any_top_k else None,
        min_p=batch.min_p,
    )
