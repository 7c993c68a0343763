"""Canonical payloads written by hand, without the adapter manager: random weights at any sites."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lorikeet_contract.manifest import (
    Manifest,
    PayloadDtype,
    PayloadLayer,
    align,
    padded_rank,
    place_layer,
    site_shapes,
)
from lorikeet_contract.schema import LoraSchema, LoraSite, SiteKind

_TORCH = {
    PayloadDtype.FLOAT32: torch.float32,
    PayloadDtype.BFLOAT16: torch.bfloat16,
    PayloadDtype.FLOAT16: torch.float16,
}


@dataclass(frozen=True, slots=True)
class SiteWeights:
    """One site's weights in the stored shapes, float32, padding rows of the rank zero."""

    site: LoraSite
    rank: int
    num_a: int
    scales: tuple[float, ...]
    a: np.ndarray
    b: np.ndarray

    def delta(self) -> np.ndarray:
        """What is added to the base weight [out, in] (or [E, out, in]; for the embedding [V, H])."""
        slices = len(self.site.slices)
        scales = np.broadcast_to(
            np.array(self.scales).reshape(-1, slices if len(self.scales) > 1 else 1),
            (max(1, self.site.num_experts), slices),
        )
        if self.site.kind is SiteKind.EMBEDDING:
            return scales[0, 0] * self.a @ self.b.T
        a = self.a.reshape(max(1, self.site.num_experts), self.num_a, -1, self.site.in_features)
        b = self.b.reshape(max(1, self.site.num_experts), self.site.out_features, -1)
        delta = np.empty((*b.shape[:2], self.site.in_features), np.float64)
        for expert in range(len(b)):
            begin = 0
            for index, piece in enumerate(self.site.slices):
                end = begin + piece.out_features
                half = a[expert, index if self.num_a == 2 else 0]
                delta[expert, begin:end] = scales[expert, index] * b[expert, begin:end] @ half
                begin = end
        return delta if self.site.kind is SiteKind.EXPERTS else delta[0]


def random_site(
    site: LoraSite, rank: int, *, num_a: int = 1, scales: tuple[float, ...] = (1.0,), seed: int = 0
) -> SiteWeights:
    """Weights that move the model visibly."""
    rng = np.random.default_rng(seed)
    shape_a, shape_b = site_shapes(site, rank, num_a)
    a = rng.standard_normal(shape_a) * 0.3
    b = rng.standard_normal(shape_b) * 0.3
    padded = padded_rank(rank)
    if site.kind is SiteKind.EMBEDDING:
        a[:, rank:] = 0
    else:
        a.reshape(-1, padded, site.in_features)[:, rank:] = 0
    b[..., rank:] = 0
    return SiteWeights(site, rank, num_a, scales, a.astype(np.float32), b.astype(np.float32))


def write_payload(
    path: Path,
    schema: LoraSchema,
    base_digest: str,
    sites: Sequence[SiteWeights],
    dtype: PayloadDtype = PayloadDtype.FLOAT32,
) -> Manifest:
    """Write the payload to `path` and return its manifest; sites are taken in the schema's order."""
    order = {site.name: index for index, site in enumerate(schema.sites)}
    layers: list[PayloadLayer] = []
    data = bytearray()
    for number in [*range(schema.num_layers), None]:
        chosen = sorted((s for s in sites if s.site.layer == number), key=lambda s: order[s.site.name])
        if not chosen:
            continue
        begin = len(data)
        placed, end = place_layer(
            begin, [(s.site, s.rank, s.num_a, s.scales) for s in chosen], dtype.itemsize
        )
        data.extend(bytes(end - begin))
        for weights, where in zip(chosen, placed, strict=True):
            for values, tensor in ((weights.a, where.a), (weights.b, where.b)):
                raw = (
                    torch.from_numpy(values)
                    .to(_TORCH[dtype])
                    .contiguous()
                    .view(torch.uint8)
                    .numpy()
                    .tobytes()
                )
                data[tensor.offset : tensor.offset + len(raw)] = raw
        digest = hashlib.sha256(data[begin:end]).hexdigest()
        layers.append(PayloadLayer(number, begin, end - begin, digest, placed))
    assert len(data) == align(len(data))
    path.write_bytes(data)
    return Manifest(base_digest, schema.digest, dtype, len(data), tuple(layers))
