"""Which parts of a decode batch's LoRA run beside the base's GEMMs, and for how many rows."""

from dataclasses import dataclass

from lorikeet_kernels.tiling.measured import MEASURED


@dataclass(frozen=True, slots=True)
class BesideRows:
    """For each part of LoRA the numbers of rows of a batch for which it runs beside; an empty range: never.

    For `joined` rows a dense projection makes its delta in its own launch, where it has one that can
    (`lora.joined_linear`), instead of beside it.

    Beside its GEMM gate_up's delta can no longer be added by the epilogue: the GEMM then stores its rows and
    the activation is a launch of its own. Few rows repay that where the GEMM would otherwise wait for LoRA's
    launch; packed experts' (MXFP4) has its weights on their way meanwhile, as `packed_gate_up` says.

    The defaults are what was best on an H200, as far as was measured: microseconds that rank-32 adapters on
    q, k, v, o and experts, 8 of them, add to a layer in a decode graph. gpt-oss-20b, MXFP4 (2026-11-30; those
    of 4 rows and the joined ones 2026-12-01):

        rows                        1       4       8      16      32      64
        one after the other      18.0    20.9    30.8    40.1    59.7    82.4
        down beside              13.7            22.9    33.6    51.2    75.9
        dense beside             14.1            26.3    33.4    52.7    80.8
        dense and down            9.8    11.4    19.6    27.1    46.2    73.6
        all                      10.5            19.3    25.5    43.1    76.3
        joined and down           6.5    10.6

    Qwen3-30B-A3B, 16 bits (2026-12-01):

        rows                        1       2       4
        one after the other      21.4    15.9    18.9
        dense and down           23.2    13.6    14.6
        all                      12.9    12.4    14.0
        joined and down          17.0    10.9    13.0
        joined, gate_up, down     7.4     9.4    13.0
    """

    dense: range = range(1, 65)
    gate_up: range = range(1, 49)
    packed_gate_up: range = range(8, 49)
    down: range = range(1, 65)
    joined: range = range(1, 5)


FASTER_BESIDE: dict[str, BesideRows] = {"NVIDIA H200": BesideRows()}
"""What was measured to be faster, by the device's name."""


def runs_beside(device: str, wanted: bool | None) -> BesideRows | None:
    """What was measured on such a device where nothing was said; asked for, the same or else the defaults."""
    if wanted is None:
        return FASTER_BESIDE.get(MEASURED.name(device))
    return FASTER_BESIDE.get(MEASURED.name(device), BesideRows()) if wanted else None
