"""Which parts of a decode batch's LoRA run beside the base's GEMMs, and for how many rows."""

from dataclasses import dataclass

from lorikeet_kernels.tiling.measured import MEASURED


@dataclass(frozen=True, slots=True)
class BesideRows:
    """For each part of LoRA the numbers of rows of a batch for which it runs beside; an empty range: never.

    Beside its GEMM gate_up's delta can no longer be added by the epilogue: the GEMM then stores its rows and
    the activation is a launch of its own, which few rows do not repay.

    The defaults are what was best on an H200, as far as was measured: microseconds that a rank-32 adapter on
    q, k, v, o and experts adds to a layer of gpt-oss-20b in a decode graph, 8 adapters (2026-11-30):

        rows                        1       8      16      32      64
        one after the other      18.0    30.8    40.1    59.7    82.4
        down beside              13.7    22.9    33.6    51.2    75.9
        dense beside             14.1    26.3    33.4    52.7    80.8
        dense and down            9.8    19.6    27.1    46.2    73.6
        all                      10.5    19.3    25.5    43.1    76.3

    `joined` are rows for which a dense projection makes its delta in its own launch, instead of beside it
    (`lora.few_rows_lora`); none until that was measured.
    """

    dense: range = range(1, 65)
    gate_up: range = range(8, 49)
    down: range = range(1, 65)
    joined: range = range(0)


FASTER_BESIDE: dict[str, BesideRows] = {"NVIDIA H200": BesideRows()}
"""What was measured to be faster, by the device's name."""


def runs_beside(device: str, wanted: bool | None) -> BesideRows | None:
    """What was measured on such a device where nothing was said; asked for, the same or else the defaults."""
    if wanted is None:
        return FASTER_BESIDE.get(MEASURED.name(device))
    return FASTER_BESIDE.get(MEASURED.name(device), BesideRows()) if wanted else None
