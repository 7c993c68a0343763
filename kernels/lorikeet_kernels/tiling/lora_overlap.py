"""Which parts of a decode batch's LoRA run beside the base's GEMMs, and for how many rows."""

from dataclasses import dataclass

from lorikeet_kernels.tiling.measured import MEASURED


@dataclass(frozen=True, slots=True)
class BesideRows:
    """For each part of LoRA the numbers of rows of a batch for which it runs beside; an empty range: never.

    For `joined` rows a dense projection makes its delta in its own launch, where it has one that can
    (`lora.joined_linear`), instead of beside it. For `fp8_joined_down` rows FP8 experts' down does
    (`experts.joined_down`); one of 16 bits gained nothing by it.

    Beside its GEMM gate_up's delta can no longer be added by the epilogue: the GEMM then stores its rows and
    the activation is a launch of its own. Few rows repay that where the GEMM would otherwise wait for LoRA's
    launch, as those of 16-bit experts do; `packed_gate_up` (MXFP4) has its weights on their way meanwhile,
    and one row of `fp8_gate_up` is quantised.

    The defaults are what was best on an H200 on 2026-12-01, as far as was measured: microseconds that
    adapters on q, k, v, o and experts, 8 of them, add to a layer in a decode graph. gpt-oss-20b, MXFP4, r 32:

        rows                        1       2       4       8      16      32      64
        one after the other      13.2    19.9    21.1    27.9    35.4    53.9    85.6
        dense beside                                             32.6    47.5    79.7
        dense and down           11.0    13.7    11.6    20.6    25.7    40.4    74.0
        all                                                      24.9    38.4    72.9
        joined and down           6.4     8.3    10.3    20.1
        joined, gate_up, down    11.4     9.7    15.0    22.4

    Qwen3-30B-A3B, 16 bits, r 32, and in FP8, r 16 (8 rows are never joined, 2 and 4 not at all sites):

        rows                        1       2       4       8      16   FP8: 1       2       4       8
        one after the other      21.4    15.9    18.9    24.5    30.0     13.1    16.3    18.0    22.3
        dense and down           23.2    13.6    14.6    20.7    26.9     10.2    14.3    17.9    26.1
        all                      12.9    12.4    14.0    18.4    23.7
        joined and down          17.0    10.9    13.0                      9.3    14.1    18.1    26.0
        joined, gate_up, down     7.4     9.4    13.0                     11.5    13.6    15.7    19.1
        joined, joined_down                                                7.3     9.6    13.1
        joined, gate_up, j_down   7.3     7.6    12.3                      9.6     9.7    10.2

    Llama-3.3-70B in FP8, r 16, one row: in a row 12.6, dense beside 11.9, joined 8.8. More rows of 16-bit and
    FP8 experts go by MXFP4's.
    """

    dense: range = range(1, 65)
    gate_up: range = range(1, 65)
    fp8_gate_up: range = range(2, 65)
    packed_gate_up: range = range(16, 65)
    down: range = range(1, 65)
    joined: range = range(1, 5)
    fp8_joined_down: range = range(1, 5)


FASTER_BESIDE: dict[str, BesideRows] = {"NVIDIA H200": BesideRows()}
"""What was measured to be faster, by the device's name."""


def runs_beside(device: str, wanted: bool | None) -> BesideRows | None:
    """What was measured on such a device where nothing was said; asked for, the same or else the defaults."""
    if wanted is None:
        return FASTER_BESIDE.get(MEASURED.name(device))
    return FASTER_BESIDE.get(MEASURED.name(device), BesideRows()) if wanted else None
