"""Keys and values in FP8 (e4m3): one scale for the keys of each key head and one for its values.

    stored = e4m3(clamp(x / scale, -448, 448))        x is read as stored * scale

Divides and rounds once from float32. A value beyond the range takes the largest there is, as in vLLM.
"""

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True, eq=False)
class KvScales:
    """Of one layer's cache, float32 [Hkv] each, above 0."""

    keys: torch.Tensor
    values: torch.Tensor


def quantize_heads(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`x` [T, Hkv, D] as the cache holds it."""
    return (x.float() / scales[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def dequantize_heads(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What `stored` [T, Hkv, D] stands for, float32."""
    return stored.float() * scales[:, None]


def check_scales(
    op: str, key_cache: torch.Tensor, value_cache: torch.Tensor, scales: KvScales | None
) -> None:
    """Raise ValueError unless FP8 caches, and only they, come with scales that fit them."""
    for cache, of in ((key_cache, scales and scales.keys), (value_cache, scales and scales.values)):
        if (cache.dtype == FP8) != (of is not None):
            raise ValueError(
                f"{op}: a cache of {cache.dtype} {'has no' if of is None else 'takes no'} scales"
            )
        if of is not None and (of.dtype != torch.float32 or of.shape != cache.shape[2:3]):
            raise ValueError(
                f"{op}: scales {of.dtype} {tuple(of.shape)} do not fit a cache {tuple(cache.shape)}: pass "
                "float32, one a head"
            )
