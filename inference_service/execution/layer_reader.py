"""One layer of a revision: from its file into host memory, verified, in the compute dtype. Any thread.

A payload in the compute dtype is read to where it stays, hashed piece by piece while it is in the core's
caches, and only multiplied by its scaling there. Any other one passes through memory of its own.
"""

import hashlib
import os
from pathlib import Path

import torch

from inference_service.domain.errors import PayloadError
from inference_service.execution.adapter_convert import TORCH_DTYPES, convert_site, scale_site
from inference_service.execution.adapter_layout import AdapterPlacer, NodeLayer
from lorikeet_contract.manifest import PayloadDtype

# Of a size that stays in a core's caches; of smaller ones, twelve readers wait for the interpreter's lock.
_PIECE_BYTES = 4 << 20


class LayerReader:
    """Reads the layers of one model's adapters."""

    def __init__(self, placer: AdapterPlacer, dtype: torch.dtype) -> None:
        self._placer = placer
        self._dtype = dtype

    def read(self, layer: NodeLayer, payload_dtype: PayloadDtype, path: Path, out: torch.Tensor) -> None:
        """Fill `out` [layer.end - layer.begin] uint8.

        Raises:
            PayloadError: the file is missing or cut short, the bytes are not the manifest's, or a value does
                not fit the compute dtype.
        """
        stored = layer.payload
        is_in_place = TORCH_DTYPES[payload_dtype] == self._dtype and _has_equal_places(layer)
        raw = out if is_in_place else torch.empty(stored.num_bytes, dtype=torch.uint8)
        _read_verified(layer, path, raw)
        for site, placed in zip(stored.sites, layer.sites, strict=True):
            model_site = self._placer.site(stored.layer, site.key)
            if is_in_place:
                scale_site(model_site, placed, out, layer.begin, self._dtype)
            else:
                convert_site(
                    model_site, site, placed, raw, stored.offset, payload_dtype, out, layer.begin, self._dtype
                )


def _has_equal_places(layer: NodeLayer) -> bool:
    """Whether the layer's tensors lie in the payload as they do on this node."""
    stored = layer.payload
    return stored.num_bytes == layer.end - layer.begin and all(
        theirs.offset - stored.offset == ours.offset - layer.begin
        for site, placed in zip(stored.sites, layer.sites, strict=True)
        for theirs, ours in ((site.a, placed.a), (site.b, placed.b))
    )


def _read_verified(layer: NodeLayer, path: Path, out: torch.Tensor) -> None:
    stored = layer.payload
    what = "the sites outside the layers" if stored.layer is None else f"layer {stored.layer}"
    digest, view, count = hashlib.sha256(), memoryview(out.numpy().data), 0
    try:
        with path.open("rb", buffering=0) as file:
            while count < stored.num_bytes:
                piece = view[count : count + _PIECE_BYTES]
                if not (num_read := os.preadv(file.fileno(), [piece], stored.offset + count)):
                    break
                digest.update(piece[:num_read])
                count += num_read
    except OSError as error:
        # No path: this text reaches the tenant.
        raise PayloadError(f"its payload cannot be read: {error.strerror}") from error
    if count != stored.num_bytes:
        raise PayloadError(
            f"its payload is cut short: {what} needs bytes {stored.offset} to "
            f"{stored.offset + stored.num_bytes}, {count} of {stored.num_bytes} are there"
        )
    if digest.hexdigest() != stored.sha256:
        raise PayloadError(f"its payload is damaged: the sha256 of {what} is not the manifest's")
