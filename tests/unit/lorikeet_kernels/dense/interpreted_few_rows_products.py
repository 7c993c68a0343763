"""The tensor cores' projection of few rows in Triton's interpreter, run by test_few_rows_linear.py."""

import gluon_stand_in
import torch

gluon_stand_in.install()

from lorikeet_kernels.dense import few_rows_products as kernel  # noqa: E402 (what it imports stands in by now)
from lorikeet_kernels.dense.few_rows_linear import few_rows_linear  # noqa: E402
from lorikeet_kernels.testing import TOLERANCE, relative_error  # noqa: E402
from lorikeet_kernels.tiling.few_rows_tiles import MAX_FEW_ROWS, FewRowsTiles  # noqa: E402


def check() -> None:
    """One row to 16; outputs that fill no program, inputs that fill no chunk; a bias or none."""
    generator = torch.Generator().manual_seed(5)
    dtype = torch.float16
    for tiles in (FewRowsTiles(8, 1, products=True), FewRowsTiles(16, 2, products=True)):
        for out_features, in_features in ((8, 256), (13, 200), (1, 8)):
            weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
            bias = torch.randn(out_features, generator=generator).to(dtype)
            x = torch.randn(MAX_FEW_ROWS, in_features, generator=generator).to(dtype)
            exact = x.double() @ weight.double().T
            rows: list[torch.Tensor] = []
            for num_rows in (1, 5, 16):
                for added in (None, bias):
                    out = torch.full((num_rows, out_features), float("nan"), dtype=dtype)
                    few_rows_linear(x[:num_rows], weight, added, out, tiles)
                    expected = exact[:num_rows] if added is None else exact[:num_rows] + added.double()
                    assert relative_error(out, expected) < TOLERANCE[dtype], (tiles, num_rows)
                rows.append(out[0])
            assert all(torch.equal(row, rows[0]) for row in rows)


if __name__ == "__main__":
    gluon_stand_in.attach(kernel)
    check()
