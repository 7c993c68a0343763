"""Adapters in host memory, ready to be copied to the device. Implements ports.HostPool."""

import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import torch

from inference_service.domain.errors import CapacityError
from inference_service.execution.adapter_layout import AdapterLayout, AdapterPlacer
from inference_service.execution.host_memory import HostMemory
from inference_service.execution.layer_reader import LayerReader
from lorikeet_contract.manifest import Manifest, PayloadDtype


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class HostAdapter:
    """A revision's bytes and layout. Whoever holds this object may read it, dropped from the pool or not.

    `layers` [n] uint8, one for each of the layout's, pinned where the device is a GPU. They are not to be
    kept without the object: its end frees them.
    """

    layout: AdapterLayout
    layers: tuple[torch.Tensor, ...]


class PinnedHostPool:
    """The host pool of one device.

    Args:
        placer: checks and lays out manifests.
        dtype: compute dtype.
        total_bytes: the pool's limit.
        executor: layers of one revision are read, verified and converted on its threads.
        memory: where the bytes lie, `total_bytes` of them.
    """

    def __init__(
        self,
        placer: AdapterPlacer,
        dtype: torch.dtype,
        total_bytes: int,
        executor: Executor,
        memory: HostMemory,
    ) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self._placer = placer
        self._reader = LayerReader(placer, dtype)
        self._executor = executor
        self._memory = memory
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
            ranges = self._memory.take([layer.end - layer.begin for layer in layout.layers])
            if ranges is None:
                raise CapacityError(
                    f"revision {digest} needs {layout.num_bytes} bytes of the host pool, whose free ones are "
                    "in pieces too small, or still being copied from"
                )
            self.used_bytes += layout.num_bytes
            self._reading.add(digest)
        adapter: HostAdapter | None = None
        try:
            self._read(manifest.dtype, layout, Path(payload_path), ranges)
            adapter = HostAdapter(layout, tuple(ranges))
        finally:
            with self._changed:
                self._reading.discard(digest)
                if adapter is None:
                    self._memory.give_back(ranges)
                    self.used_bytes -= layout.num_bytes
                else:
                    self._memory.give_back_with(adapter, ranges)
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

    def _read(
        self, payload_dtype: PayloadDtype, layout: AdapterLayout, path: Path, ranges: Sequence[torch.Tensor]
    ) -> None:
        # All layers end before an error leaves: none may still write into bytes that are given up.
        futures = [
            self._executor.submit(self._reader.read, layer, payload_dtype, path, part)
            for layer, part in zip(layout.layers, ranges, strict=True)
        ]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
