"""Adapters in host memory, ready to be copied to the device. Implements ports.HostPool."""

import hashlib
import threading
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import torch

from inference_service.domain.errors import CapacityError, PayloadError
from inference_service.execution.adapter_convert import convert_site
from inference_service.execution.adapter_layout import AdapterLayout, AdapterPlacer, NodeLayer
from lorikeet_contract.manifest import Manifest, PayloadDtype


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """A revision's bytes and layout. Whoever holds this object may read it, dropped from the pool or not."""

    layout: AdapterLayout
    data: torch.Tensor  # [N] uint8, pinned where the device is a GPU


class PinnedHostPool:
    """The host pool of one device.

    Args:
        placer: checks and lays out manifests.
        dtype: compute dtype.
        total_bytes: the pool's limit.
        executor: layers of one revision are read, verified and converted on its threads.
        pin_memory: page-lock the bytes, as asynchronous copies to a GPU need.
    """

    def __init__(
        self,
        placer: AdapterPlacer,
        dtype: torch.dtype,
        total_bytes: int,
        executor: Executor,
        *,
        pin_memory: bool,
    ) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self._placer = placer
        self._dtype = dtype
        self._executor = executor
        self._pin_memory = pin_memory
        self._adapters: dict[str, HostAdapter] = {}
        self._reading: set[str] = set()
        self._changed = threading.Condition()

    def bytes_needed(self, manifest: Manifest) -> int:
        """See ports.HostPool; raises as `read` does for a manifest that cannot be placed."""
        return self._placer.place(manifest).num_bytes

    def read(self, manifest: Manifest, payload_path: str) -> int:
        """See ports.HostPool. A revision that is there already, or being read, is not read again.

        Raises:
            PayloadError: the file is missing, cut short or does not match the manifest; or the manifest does
                not match the model; or a value does not fit the compute dtype.
            AdapterTooLargeError: a rank beyond this node's limit.
            CapacityError: it does not fit; nothing was kept.
        """
        digest = manifest.digest
        layout = self._placer.place(manifest)
        with self._changed:
            self._changed.wait_for(lambda: digest not in self._reading)
            if digest in self._adapters:
                return layout.num_bytes
            if self.used_bytes + layout.num_bytes > self.total_bytes:
                raise CapacityError(
                    f"revision {digest} needs {layout.num_bytes} bytes of the host pool, "
                    f"{self.total_bytes - self.used_bytes} of {self.total_bytes} are free"
                )
            self.used_bytes += layout.num_bytes
            self._reading.add(digest)
        adapter: HostAdapter | None = None
        try:
            adapter = self._read(manifest.dtype, layout, Path(payload_path))
        finally:
            with self._changed:
                self._reading.discard(digest)
                if adapter is None:
                    self.used_bytes -= layout.num_bytes
                else:
                    self._adapters[digest] = adapter
                self._changed.notify_all()
        return layout.num_bytes

    def drop(self, digest: str) -> None:
        """See ports.HostPool. A copy in progress keeps the bytes alive until it ends."""
        with self._changed:
            adapter = self._adapters.pop(digest, None)
            if adapter is not None:
                self.used_bytes -= adapter.layout.num_bytes

    def get(self, digest: str) -> HostAdapter | None:
        """The revision, or None where it is not here."""
        with self._changed:
            return self._adapters.get(digest)

    def _read(self, payload_dtype: PayloadDtype, layout: AdapterLayout, path: Path) -> HostAdapter:
        data = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=self._pin_memory)
        # All layers end before an error leaves: none may still write into bytes that are given up.
        futures = [
            self._executor.submit(self._read_layer, layer, payload_dtype, path, data)
            for layer in layout.layers
        ]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return HostAdapter(layout, data)

    def _read_layer(
        self, layer: NodeLayer, payload_dtype: PayloadDtype, path: Path, data: torch.Tensor
    ) -> None:
        stored = layer.payload
        what = "the sites outside the layers" if stored.layer is None else f"layer {stored.layer}"
        raw = bytearray(stored.num_bytes)
        try:
            with path.open("rb") as file:
                file.seek(stored.offset)
                count = file.readinto(raw)
        except OSError as error:
            # No path: this text reaches the tenant.
            raise PayloadError(f"its payload cannot be read: {error.strerror}") from error
        if count != stored.num_bytes:
            raise PayloadError(
                f"its payload is cut short: {what} needs bytes {stored.offset} to "
                f"{stored.offset + stored.num_bytes}, {count} of {stored.num_bytes} are there"
            )
        if hashlib.sha256(raw).hexdigest() != stored.sha256:
            raise PayloadError(f"its payload is damaged: the sha256 of {what} is not the manifest's")
        if not raw:
            return
        source = torch.frombuffer(raw, dtype=torch.uint8)
        for site, placed in zip(stored.sites, layer.sites, strict=True):
            convert_site(
                self._placer.site(stored.layer, site.key),
                site,
                placed,
                source,
                stored.offset,
                payload_dtype,
                data,
                self._dtype,
            )
