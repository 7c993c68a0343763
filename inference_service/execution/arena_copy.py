"""Copies of one revision from the host pool into the arena, layer by layer, on a CPU or a GPU."""

from typing import Protocol

import torch

from inference_service.execution.host_pool import HostAdapter


class ArenaCopy(Protocol):
    """A copy in progress; holds what it reads alive."""

    def advance(self) -> bool:
        """Do a bounded share of the work; True once all bytes are in place for work started from now on."""
        ...


class CpuCopy:
    """Copies on the caller's thread, some layers a call, so that a large adapter does not stop the steps."""

    BYTES_PER_CALL = 64 << 20

    def __init__(self, adapter: HostAdapter, destination: torch.Tensor) -> None:
        self._adapter = adapter
        self._destination = destination
        self._next = 0

    def advance(self) -> bool:
        """See ArenaCopy."""
        layers = self._adapter.layout.layers
        budget = self.BYTES_PER_CALL
        while self._next < len(layers) and budget > 0:
            layer = layers[self._next]
            self._destination[layer.begin : layer.end].copy_(self._adapter.layers[self._next])
            budget -= layer.end - layer.begin
            self._next += 1
        return self._next == len(layers)


class CudaCopy:
    """Enqueues one copy a layer on the copy stream, all at once, and asks an event; the host never waits.

    The copy stream first waits for the compute stream: the range may have belonged to an adapter that steps
    already enqueued still read.
    """

    def __init__(self, adapter: HostAdapter, destination: torch.Tensor, stream: torch.cuda.Stream) -> None:
        self._adapter = adapter
        stream.wait_stream(torch.cuda.current_stream(destination.device))
        with torch.cuda.stream(stream):
            for layer, data in zip(adapter.layout.layers, adapter.layers, strict=True):
                destination[layer.begin : layer.end].copy_(data, non_blocking=True)
        self._done = stream.record_event()

    def advance(self) -> bool:
        """See ArenaCopy."""
        return self._done.query()
