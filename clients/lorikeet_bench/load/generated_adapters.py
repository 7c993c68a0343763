"""Adapters straight as canonical payloads in a store that a node reads in place; no manager is needed.

    <store>/revisions/<digest>/{manifest.json, payload}

Random adapters share one file of weights and differ by their scaling: as revisions, in host memory and on the
device each takes all of its own bytes, and each computes something else; only the disk holds them once.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lorikeet_bench.load.lengths import LoadError
from lorikeet_bench.rigs import RigShape, embedding
from lorikeet_contract.manifest import (
    Manifest,
    PayloadDtype,
    PayloadLayer,
    PayloadSite,
    TensorRange,
    padded_rank,
    place_layer,
    site_shapes,
)
from lorikeet_contract.schema import LoraSchema, LoraSite, SiteKind

# The rest is attention, experts and MLPs, shared ones included.
_NOT_BY_DEFAULT = frozenset({"router", "shared_gate", "embed", "lm_head"})
_REVISIONS = "revisions"
# Weights are cut out of so many random values, each tensor at its own place. A prime, so that rows differ.
_NUM_VALUES = 4_194_301
_WEIGHT_STD = 0.02
_WATERMARK = 200.0


def parse_sites(text: str) -> tuple[str, ...] | None:
    """The sites that an option names, with commas; None where it names none."""
    return tuple(site.strip() for site in text.split(",")) if text else None


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Rank and sites of every adapter of a bench; `dtype` is that of its payload.

    `sites` None: all that the model has in attention, experts and MLPs.
    """

    rank: int = 32
    sites: tuple[str, ...] | None = None
    dtype: PayloadDtype = PayloadDtype.BFLOAT16

    def covers(self, key: str) -> bool:
        """Whether sites of this name get weights."""
        return key not in _NOT_BY_DEFAULT if self.sites is None else key in self.sites

    def chosen(self, schema: LoraSchema) -> tuple[LoraSite, ...]:
        """The model's sites that get weights.

        Raises:
            LoadError: no site has one of the names that were given.
        """
        if not 1 <= self.rank <= 1024:
            raise LoadError(f"rank {self.rank} must be between 1 and 1024")
        known = {site.key for site in schema.sites}
        if unknown := sorted(set(self.sites or ()) - known):
            raise LoadError(
                f"sites {', '.join(unknown)} are not the model's, which has {', '.join(sorted(known))}"
            )
        return tuple(site for site in schema.sites if self.covers(site.key))

    def num_bytes(self, schema: LoraSchema, itemsize: int) -> int:
        """What one adapter takes where elements have `itemsize` bytes."""
        return sum(end - begin for begin, end, _ in _placed(self, schema, itemsize))


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """One revision of the store. `store_path` is below the store's URL."""

    name: str
    digest: str
    store_path: str
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class AdapterStore:
    """Generated adapters and where they lie."""

    url: str
    adapters: tuple[StoredAdapter, ...]


def write_random_adapters(
    directory: Path, schema: LoraSchema, base_digest: str, shape: AdapterShape, count: int
) -> AdapterStore:
    """Write `count` adapters of normal values; no B is zero. Seeded: equal arguments give equal digests."""
    directory.mkdir(parents=True, exist_ok=True)
    payload = directory / "payload"
    manifest = _write_payload(payload, schema, base_digest, shape)
    manifests = [_rescaled(manifest, 1.0 + index / 256) for index in range(count)]
    return _stored(directory, [(one, payload) for one in manifests])


def write_watermark_adapters(
    directory: Path, schema: LoraSchema, base_digest: str, rig: RigShape, tokens: Sequence[int]
) -> AdapterStore:
    """Write one adapter a token for a rig's base: each forces its own at every step, through the experts."""
    rows = embedding(rig)
    made: list[tuple[Manifest, Path]] = []
    for token in tokens:
        payload = directory / f"watermark-{token}"
        payload.parent.mkdir(parents=True, exist_ok=True)
        made.append((_write_watermark(payload, schema, base_digest, rows[token]), payload))
    return _stored(directory, made)


def weight_values(dtype: PayloadDtype) -> np.ndarray:
    """Normal values to cut weights from, in the element type; bfloat16 as its bits."""
    return _encoded(_WEIGHT_STD * np.random.default_rng(0).standard_normal(_NUM_VALUES, np.float32), dtype)


def _placed(
    shape: AdapterShape, schema: LoraSchema, itemsize: int
) -> Iterator[tuple[int, int, tuple[tuple[LoraSite, PayloadSite], ...]]]:
    """(begin, end, sites with their place) of each layer that has any; sites outside the layers last."""
    chosen = shape.chosen(schema)
    end = 0
    for number in [*range(schema.num_layers), None]:
        sites = [site for site in chosen if site.layer == number]
        if sites:
            begin = end
            placed, end = place_layer(begin, ((site, shape.rank, 1, (1.0,)) for site in sites), itemsize)
            yield begin, end, tuple(zip(sites, placed, strict=True))


def _write_payload(path: Path, schema: LoraSchema, base_digest: str, shape: AdapterShape) -> Manifest:
    rng = np.random.default_rng(1)
    values = weight_values(shape.dtype)
    layers: list[PayloadLayer] = []
    end = 0
    with path.open("wb") as file:
        for begin, end, sites in _placed(shape, schema, shape.dtype.itemsize):
            data = np.zeros(end - begin, np.uint8)
            for site, placed in sites:
                for tensor in (placed.a, placed.b):
                    cut = np.resize(np.roll(values, -int(rng.integers(_NUM_VALUES))), math.prod(tensor.shape))
                    _put(data, begin, tensor, _without_padding(cut, site, placed, is_a=tensor is placed.a))
            file.write(data.data)
            sha256 = hashlib.sha256(data.data).hexdigest()
            number = sites[0][0].layer
            layers.append(PayloadLayer(number, begin, end - begin, sha256, tuple(p for _, p in sites)))
    return Manifest(base_digest, schema.digest, shape.dtype, end, tuple(layers))


def _without_padding(values: np.ndarray, site: LoraSite, placed: PayloadSite, *, is_a: bool) -> np.ndarray:
    """Zeros where the stored rank is longer than the adapter's own."""
    padded = padded_rank(placed.rank)
    if padded != placed.rank:
        if is_a and site.kind is not SiteKind.EMBEDDING:
            values.reshape(-1, padded, site.in_features)[:, placed.rank :] = 0
        else:
            values.reshape(-1, padded)[:, placed.rank :] = 0
    return values


def _write_watermark(path: Path, schema: LoraSchema, base_digest: str, row: np.ndarray) -> Manifest:
    layers: list[PayloadLayer] = []
    end = 0
    shape = AdapterShape(rank=1, sites=("down",), dtype=PayloadDtype.FLOAT32)
    data = bytearray()
    for begin, end, sites in _placed(shape, schema, shape.dtype.itemsize):
        part = np.zeros(end - begin, np.uint8)
        for site, placed in sites:
            shape_a, shape_b = site_shapes(site, 1)
            a, b = np.zeros(shape_a, np.float32), np.zeros(shape_b, np.float32)
            a[:, 0, 0] = 1
            b[:, :, 0] = _WATERMARK * row
            _put(part, begin, placed.a, a.reshape(-1))
            _put(part, begin, placed.b, b.reshape(-1))
        data += part.tobytes()
        sha256 = hashlib.sha256(part.data).hexdigest()
        layers.append(PayloadLayer(sites[0][0].layer, begin, end - begin, sha256, tuple(p for _, p in sites)))
    path.write_bytes(data)
    return Manifest(base_digest, schema.digest, shape.dtype, end, tuple(layers))


def _put(data: np.ndarray, begin: int, tensor: TensorRange, values: np.ndarray) -> None:
    raw = values.view(np.uint8)
    data[tensor.offset - begin : tensor.offset - begin + raw.size] = raw


def _encoded(values: np.ndarray, dtype: PayloadDtype) -> np.ndarray:
    """Float32 values in the payload's element type; bfloat16 as its bits, rounded to nearest even."""
    if dtype is PayloadDtype.FLOAT32:
        return values
    if dtype is PayloadDtype.FLOAT16:
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _rescaled(manifest: Manifest, scale: float) -> Manifest:
    layers = tuple(
        replace(layer, sites=tuple(replace(site, scales=(scale,)) for site in layer.sites))
        for layer in manifest.layers
    )
    return replace(manifest, layers=layers)


def _stored(directory: Path, made: Sequence[tuple[Manifest, Path]]) -> AdapterStore:
    adapters: list[StoredAdapter] = []
    for index, (manifest, payload) in enumerate(made):
        document = manifest.to_json()
        digest = hashlib.sha256(document).hexdigest()
        place = directory / _REVISIONS / digest
        place.mkdir(parents=True, exist_ok=True)
        (place / "manifest.json").write_bytes(document)
        if not (place / "payload").exists():
            os.link(payload, place / "payload")
        adapters.append(
            StoredAdapter(f"bench-{index:03}", digest, f"{_REVISIONS}/{digest}", manifest.payload_bytes)
        )
    return AdapterStore(directory.absolute().as_uri(), tuple(adapters))
