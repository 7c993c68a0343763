"""Which parts of a decode batch's LoRA run beside the base's GEMMs, and from how many rows on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BesideRows:
    """For each part of LoRA the fewest rows of a batch at which it runs beside; None: never.

    Beside its GEMM gate_up's delta can no longer be added by the epilogue: the GEMM then stores its rows and
    the activation is a launch of its own, which few rows do not repay.
    """

    dense: int | None = 1
    gate_up: int | None = 8
    down: int | None = 1

    def takes(self, part: int | None, num_rows: int) -> bool:
        """Whether a batch of `num_rows` is large enough for a part, one of these fields."""
        return part is not None and num_rows >= part


# What was measured to be faster, by the device's name: an H200's decode step with a rank-32 adapter on every
# site takes 2102 instead of 2187 us with down beside at 1 row, 5473 instead of 5606 at 32 (gpt-oss-20b).
FASTER_BESIDE: dict[str, BesideRows] = {"NVIDIA H200": BesideRows(dense=None, gate_up=None, down=1)}


def runs_beside(device: str, wanted: bool | None) -> BesideRows | None:
    """All parts where it was asked for, those that were measured to be faster where nothing was said."""
    if wanted is None:
        return FASTER_BESIDE.get(device)
    return BesideRows() if wanted else None
