"""Random weights in place of a checkpoint, for benches of sizes whose files are not at hand."""

from collections.abc import Sequence

import torch

_PACKED_EXPONENT = 121  # 2 ** -6, so that packed weights are as small as the others


class DummyWeights:
    """A WeightSource of small normal values; norms come out near 1, as a forward pass needs. Seeded."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)

    def read_into(self, destination: torch.Tensor, name: str, *, transpose: bool = False) -> None:
        """Fill `destination`; the name only says whether it is a norm, or the scales of packed bytes."""
        del transpose
        if destination.dtype != torch.uint8:
            destination.normal_(1.0 if "norm" in name else 0.0, 0.02, generator=self._generator)
        elif name.endswith("_scales"):
            destination.fill_(_PACKED_EXPONENT)
        else:
            destination.random_(0, 256, generator=self._generator)

    def wait(self, *names: str) -> None:
        """Everything is in place already."""

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """Nothing can be missing."""
