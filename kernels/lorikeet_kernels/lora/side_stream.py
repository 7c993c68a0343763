"""A second stream, on which LoRA ops run beside the base's: fork, both, join. Captured graphs keep that."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from lorikeet_kernels.tiling.lora_overlap import BesideRows

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, eq=False)
class SideStream:
    """`stream` is None on a CPU, where the branch follows the base: all else is the same there.

    `rows` says which parts of LoRA use it.
    """

    stream: torch.cuda.Stream | None
    rows: BesideRows

    @classmethod
    def on(cls, device: torch.device, rows: BesideRows) -> "SideStream":
        """A stream of the lowest priority; graphs are captured on one of a higher."""
        return cls(torch.cuda.Stream(device, priority=0) if device.type == "cuda" else None, rows)

    def beside(self, base: Callable[[], Made], branch: Callable[[], None]) -> Made:
        """Enqueue both so that neither waits for the other, and all that follows for both; return base's.

        Both may read what was enqueued before, and neither what the other writes. The branch comes second, so
        that the base's programs get the multiprocessors first. What the two share is the current stream's
        memory, which nobody gets before this stream has waited.
        """
        if self.stream is None:
            made = base()
            branch()
            return made
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        made = base()
        with torch.cuda.stream(self.stream):
            branch()
        current.wait_stream(self.stream)
        return made
