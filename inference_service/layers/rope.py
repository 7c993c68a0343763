"""Rotary tables: cosines and sines of every position, made once per model."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """What a config says of its rotary embedding, both config styles read into one.

    `kind` is "default", "linear", "llama3" or "yarn"; fields of other kinds are ignored. `rotary_dim` is the
    rotated part of a head. `attention_factor` None lets yarn compute its own.
    """

    rotary_dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None


def rope_table(parameters: RopeParameters, num_positions: int, device: torch.device) -> torch.Tensor:
    """Return [P, 2, rotary_dim / 2] float32: cosines, then sines, the attention factor multiplied in."""
    frequencies = _FREQUENCIES[parameters.kind](parameters)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    table = torch.stack((angles.cos(), angles.sin()), dim=1) * _attention_factor(parameters)
    return table.to(device)


def _default(p: RopeParameters) -> torch.Tensor:
    exponents = torch.arange(0, p.rotary_dim, 2, dtype=torch.float32) / p.rotary_dim
    return 1.0 / p.theta**exponents


def _linear(p: RopeParameters) -> torch.Tensor:
    return _default(p) / p.factor


def _llama3(p: RopeParameters) -> torch.Tensor:
    """Slow frequencies are divided by `factor`, fast ones stay, those between are blended."""
    frequencies = _default(p)
    wavelengths = 2 * math.pi / frequencies
    turns = p.original_max_position / wavelengths
    keep = ((turns - p.low_freq_factor) / (p.high_freq_factor - p.low_freq_factor)).clamp(0, 1)
    return frequencies / p.factor * (1 - keep) + frequencies * keep


def _yarn(p: RopeParameters) -> torch.Tensor:
    """As llama3, but blended linearly over the dimensions between two numbers of turns."""
    low, high = _yarn_dimension(p, p.beta_fast), _yarn_dimension(p, p.beta_slow)
    if p.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, p.rotary_dim - 1)
    ramp = (torch.arange(p.rotary_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    keep = 1 - ramp.clamp(0, 1)
    frequencies = _default(p)
    return frequencies / p.factor * (1 - keep) + frequencies * keep


def _yarn_dimension(p: RopeParameters, turns: float) -> float:
    """The (fractional) dimension that makes `turns` turns over the original context."""
    return p.rotary_dim * math.log(p.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(p.theta))


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Yarn's attention temperature for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _attention_factor(p: RopeParameters) -> float:
    if p.attention_factor is not None:
        return p.attention_factor
    if p.kind != "yarn":
        return 1.0
    if p.mscale and p.mscale_all_dim:
        return yarn_mscale(p.factor, p.mscale) / yarn_mscale(p.factor, p.mscale_all_dim)
    return yarn_mscale(p.factor)


_FREQUENCIES = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
ROPE_KINDS = frozenset(_FREQUENCIES)
