"""Where a revision's tensors lie on this node: the payload's layout at the compute dtype's element size."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from inference_service.domain.errors import AdapterTooLargeError, PayloadError
from lorikeet_contract.manifest import Manifest, PayloadLayer, PayloadSite, place_layer, site_shapes
from lorikeet_contract.schema import LoraSchema, LoraSite


@dataclass(frozen=True, slots=True)
class NodeLayer:
    """One layer's bytes [begin, end) of the revision on this node, beside its range of the payload.

    `sites` are placed on this node, in the order of `payload.sites`.
    """

    payload: PayloadLayer
    begin: int
    end: int
    sites: tuple[PayloadSite, ...]


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """A revision on this node; host pool and arena use the same bytes."""

    layers: tuple[NodeLayer, ...]
    num_bytes: int


class AdapterPlacer:
    """Checks manifests against the model and lays them out."""

    def __init__(self, schema: LoraSchema, base_digest: str, itemsize: int, max_rank: int) -> None:
        self._schema_digest = schema.digest
        self._base_digest = base_digest
        self._itemsize = itemsize
        self._max_rank = max_rank
        self._sites: Mapping[tuple[int | None, str], LoraSite] = {
            (site.layer, site.key): site for site in schema.sites
        }
        self.indices: Mapping[tuple[int | None, str], int] = {
            (site.layer, site.key): index for index, site in enumerate(schema.sites)
        }

    def site(self, layer: int | None, key: str) -> LoraSite:
        """The model's site; the layout that named it exists, so it does too."""
        return self._sites[layer, key]

    def place(self, manifest: Manifest) -> AdapterLayout:
        """Lay a revision out.

        Raises:
            PayloadError: the manifest is for another base model, or does not agree with itself.
            AdapterTooLargeError: a rank beyond what this node serves.
        """
        self._check_base(manifest)
        layers: list[NodeLayer] = []
        offset = 0
        for layer in manifest.layers:
            for site in layer.sites:
                self._check_site(layer, site, manifest.dtype.itemsize)
            placed, end = place_layer(
                offset,
                ((self._sites[layer.layer, s.key], s.rank, s.num_a, s.scales) for s in layer.sites),
                self._itemsize,
            )
            layers.append(NodeLayer(layer, offset, end, placed))
            offset = end
        return AdapterLayout(tuple(layers), offset)

    def _check_base(self, manifest: Manifest) -> None:
        for what, theirs, ours in (
            ("base model", manifest.base_digest, self._base_digest),
            ("LoRA schema", manifest.schema_digest, self._schema_digest),
        ):
            if theirs != ours:
                raise PayloadError(
                    f"the revision was made for {what} {theirs}, this node serves {ours}; upload the adapter "
                    "again against this model",
                    metadata={"manifest": theirs, "node": ours},
                )

    def _check_site(self, layer: PayloadLayer, site: PayloadSite, itemsize: int) -> None:
        known = self._sites.get((layer.layer, site.key))
        where = site.key if layer.layer is None else f"layers.{layer.layer}.{site.key}"
        if known is None:
            raise PayloadError(f"the manifest names site {where!r}, which this model does not have")
        if site.rank > self._max_rank:
            raise AdapterTooLargeError(
                f"site {where} has rank {site.rank}, this node serves ranks up to {self._max_rank} "
                "(--max-rank)",
                metadata={"limit": "max_rank", "value": str(site.rank), "maximum": str(self._max_rank)},
            )
        shapes = site_shapes(known, site.rank, site.num_a)
        if (site.a.shape, site.b.shape) != shapes or site.num_a not in (1, len(known.slices)):
            raise PayloadError(
                f"site {where} of rank {site.rank} has A {site.a.shape} and B {site.b.shape}, the model "
                f"needs {shapes[0]} and {shapes[1]}"
            )
        allowed = {1, len(known.slices), max(1, known.num_experts) * len(known.slices)}
        if len(site.scales) not in allowed:
            raise PayloadError(
                f"site {where} has {len(site.scales)} scales, expected one of {sorted(allowed)}"
            )
        for tensor in (site.a, site.b):
            end = tensor.offset + math.prod(tensor.shape) * itemsize
            if tensor.offset < layer.offset or end > layer.offset + layer.num_bytes:
                raise PayloadError(f"site {where} lies outside its layer's bytes")
