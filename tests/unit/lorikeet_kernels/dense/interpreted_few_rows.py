"""The dense projection of few rows in Triton's interpreter, run by test_few_rows_linear.py.

TRITON_INTERPRET is read when a kernel is defined, so it must be set before the first import. Nothing here is
multiplied as matrices, so bfloat16 is the interpreter's too, but for its rounding: it cuts bits off.
"""

import torch

from lorikeet_kernels.dense.few_rows_linear import few_rows_linear
from lorikeet_kernels.testing import TOLERANCE, relative_error
from lorikeet_kernels.tiling.few_rows_tiles import FewRowsTiles

TILES = (FewRowsTiles(1, 1), FewRowsTiles(2, 4), FewRowsTiles(4, 2))
SIZES = ((5, 104), (4, 1032), (1, 8))
ALLOWED = {torch.bfloat16: 2 * TOLERANCE[torch.bfloat16], torch.float16: TOLERANCE[torch.float16]}


def check() -> None:
    """Every number of rows; outputs that fill no program, inputs that fill no chunk; a bias or none."""
    generator = torch.Generator().manual_seed(5)
    for dtype in (torch.bfloat16, torch.float16):
        for tiles in TILES:
            for out_features, in_features in SIZES:
                weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
                bias = torch.randn(out_features, generator=generator).to(dtype)
                x = torch.randn(8, in_features, generator=generator).to(dtype)
                exact = x.double() @ weight.double().T
                rows = []
                for num_rows in (1, 2, 3, 4, 5, 8) if tiles.rows == 2 else (1, 3):
                    for added in (None, bias):
                        out = torch.full((num_rows, out_features), float("nan"), dtype=dtype)
                        few_rows_linear(x[:num_rows], weight, added, out, tiles)
                        expected = exact[:num_rows] if added is None else exact[:num_rows] + added.double()
                        assert relative_error(out, expected) < ALLOWED[dtype], (dtype, tiles, num_rows)
                    rows.append(out[0])
                assert all(torch.equal(row, rows[0]) for row in rows)


if __name__ == "__main__":
    check()
