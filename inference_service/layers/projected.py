"""What a projection made, and what its adapters add, where that was made beside it and is still apart."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Projected:
    """Rows `y` [T, N]; whoever reads them adds `delta` [T, N] float32 first and rounds to y's dtype.

    The sum has the bits of rows whose adapters were added in place. Where a row has none, so have y's own.
    `is_joined`: one launch made both, so that the reader's may start ahead of its end.
    """

    y: torch.Tensor
    delta: torch.Tensor | None = None
    is_joined: bool = False

    def whole(self) -> torch.Tensor:
        """`y`, which receives the sum: for a reader that cannot add, and for the only one."""
        return self.y if self.delta is None else self.y.add_(self.delta)
