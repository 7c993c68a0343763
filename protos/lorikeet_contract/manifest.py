"""The canonical adapter payload's manifest. Its sha256 is the revision's identity.

The payload is layer-major: each layer's tensors form one contiguous range, every tensor starts at a multiple
of ALIGNMENT bytes, little-endian, row-major. Sites outside the layers form one last range. Ranks are exact
per site; stored rank dimensions are padded with zeros to a multiple of RANK_MULTIPLE: rows can be read wide.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from lorikeet_contract.schema import LoraSite, SiteKind

FORMAT = "lorikeet-adapter/1"
ALIGNMENT = 256
RANK_MULTIPLE = 8


class PayloadDtype(StrEnum):
    """Element types of a payload; the adapter's own, never narrowed."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return 4 if self is PayloadDtype.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class TensorRange:
    """A tensor's place: `offset` bytes from the start of the payload."""

    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PayloadSite:
    """One site's weights.

    `rank` is the adapter's own; shapes carry the padded one, R = padded_rank(rank). `num_a` is 1 or, where
    the two slices of an experts site have their own A, 2: rows [0, R) of A feed the first slice's rows of B
    and rows [R, 2R) the second's. `scales` has one value, or num_slices values, or num_experts * num_slices
    values (expert-major) where a rank or alpha pattern differs inside the site; the node multiplies B's rows
    by them.
    """

    key: str
    rank: int
    num_a: int
    scales: tuple[float, ...]
    a: TensorRange
    b: TensorRange


@dataclass(frozen=True, slots=True)
class PayloadLayer:
    """One contiguous range of the payload; `layer` is None for the sites outside the layers."""

    layer: int | None
    offset: int
    num_bytes: int
    sha256: str
    sites: tuple[PayloadSite, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an adapter revision consists of. Equal content gives equal bytes and so an equal digest."""

    base_digest: str
    schema_digest: str
    dtype: PayloadDtype
    payload_bytes: int
    layers: tuple[PayloadLayer, ...]
    format: str = FORMAT

    def to_json(self) -> bytes:
        """Canonical JSON: sorted keys, no white space."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @property
    def digest(self) -> str:
        """Sha256 of the canonical JSON, lower-case hex: the revision's identity."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @property
    def max_rank(self) -> int:
        """The largest rank of any site."""
        return max((s.rank for layer in self.layers for s in layer.sites), default=0)

    @staticmethod
    def from_json(data: bytes) -> "Manifest":
        """Inverse of `to_json`; raises KeyError, TypeError or ValueError on anything else."""
        raw: dict[str, Any] = json.loads(data)
        if raw["format"] != FORMAT:
            msg = f"manifest format {raw['format']!r} is not {FORMAT!r}"
            raise ValueError(msg)
        return Manifest(
            base_digest=raw["base_digest"],
            schema_digest=raw["schema_digest"],
            dtype=PayloadDtype(raw["dtype"]),
            payload_bytes=raw["payload_bytes"],
            layers=tuple(_layer(layer) for layer in raw["layers"]),
        )


def padded_rank(rank: int) -> int:
    """The stored rank dimension: `rank` rounded up to a multiple of RANK_MULTIPLE."""
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE


def site_shapes(site: LoraSite, rank: int, num_a: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The stored shapes of A and B at a site, for the adapter's own `rank` there."""
    r = padded_rank(rank)
    if site.kind is SiteKind.EXPERTS:
        return (site.num_experts, num_a * r, site.in_features), (site.num_experts, site.out_features, r)
    if site.kind is SiteKind.EMBEDDING:
        return (site.in_features, r), (site.out_features, r)
    return (num_a * r, site.in_features), (site.out_features, r)


def place_layer(
    offset: int, sites: Iterable[tuple[LoraSite, int, int, tuple[float, ...]]], itemsize: int
) -> tuple[tuple[PayloadSite, ...], int]:
    """Lay one layer's (site, rank, num_a, scales) out from `offset`, A before B, each aligned.

    Returns the placed sites and the end offset, itself aligned. The node uses the same function with its
    compute dtype's itemsize, so host, arena and payload differ in nothing but the element size.
    """
    placed: list[PayloadSite] = []
    for site, rank, num_a, scales in sites:
        shape_a, shape_b = site_shapes(site, rank, num_a)
        a = TensorRange(offset, shape_a)
        offset = align(offset + math.prod(shape_a) * itemsize)
        b = TensorRange(offset, shape_b)
        offset = align(offset + math.prod(shape_b) * itemsize)
        placed.append(PayloadSite(site.key, rank, num_a, scales, a, b))
    return tuple(placed), offset


def align(offset: int) -> int:
    """`offset` rounded up to ALIGNMENT."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _layer(raw: dict[str, Any]) -> PayloadLayer:
    return PayloadLayer(
        layer=raw["layer"],
        offset=raw["offset"],
        num_bytes=raw["num_bytes"],
        sha256=raw["sha256"],
        sites=tuple(
            PayloadSite(
                key=s["key"],
                rank=s["rank"],
                num_a=s["num_a"],
                scales=tuple(s["scales"]),
                a=TensorRange(s["a"]["offset"], tuple(s["a"]["shape"])),
                b=TensorRange(s["b"]["offset"], tuple(s["b"]["shape"])),
            )
            for s in raw["sites"]
        ),
    )
