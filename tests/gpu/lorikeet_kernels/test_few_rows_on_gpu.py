"""Dense projections of few rows on a GPU against float64, and behind a launch that still runs."""

import pytest
import torch

from lorikeet_kernels.benchmarking.graph_timing import capture
from lorikeet_kernels.dense import linear as dense_linear
from lorikeet_kernels.dense.few_rows_linear import few_rows_linear
from lorikeet_kernels.dense.linear import linear
from lorikeet_kernels.dense.rms_norm import rms_norm
from lorikeet_kernels.testing import TOLERANCE, relative_error
from lorikeet_kernels.tiling.few_rows_tiles import MAX_FEW_ROWS, FewRowsShape, FewRowsTiles, rule
from lorikeet_kernels.warm_up_base import warm_up_few_rows

GPU = torch.device("cuda")
SIZES = ((5120, 2880), (131, 1032), (7, 104), (33, 4096), (1, 8))
CASES = (
    (FewRowsTiles(1, 1), (1, 2, 8)),
    (FewRowsTiles(2, 4), (1, 3)),
    (FewRowsTiles(4, 8), (1, 4, 5)),
    (FewRowsTiles(4, 4, 64), (2, 6)),
    (FewRowsTiles(8, 4, products=True), (1, 9)),
    (FewRowsTiles(8, 8, 80, products=True), (2, 16)),
    (FewRowsTiles(16, 8, products=True), (4, 13)),
    (None, (1, 4, 7)),
    (None, (16, 12)),
)


FLOAT32_SUM = 2.0**-19  # of a sum's terms together, what adding up to 4,096 of them in float32 may leave


def half_steps(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What one rounding of these numbers to `dtype` may change: half the distance of its neighbours there."""
    return torch.finfo(dtype).eps * torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_few_rows(out_features: int, in_features: int, dtype: torch.dtype) -> None:
    """All kinds of tiles, with a bias and without: rounded once, each number; a row's bits are its own."""
    weight = torch.randn(out_features, in_features, device=GPU).to(dtype)
    bias = torch.randn(out_features, device=GPU).to(dtype)
    x = torch.randn(MAX_FEW_ROWS, in_features, device=GPU).to(dtype)
    for index, (tiles, counts) in enumerate(CASES):
        added = bias if index % 2 == 0 else None
        exact = x.double() @ weight.double().T
        exact = exact if added is None else exact + added.double()
        rows: list[torch.Tensor] = []
        for num_rows in counts:
            out = torch.full((num_rows, out_features), float("nan"), dtype=dtype, device=GPU)
            few_rows_linear(
                x[:num_rows],
                weight,
                added,
                out,
                tiles or rule(FewRowsShape(counts[0], out_features, in_features)),
            )
            expected = exact[:num_rows]
            terms = x[:num_rows].double().abs() @ weight.double().abs().T + bias.double().abs()
            bound = half_steps(expected, dtype) + terms * FLOAT32_SUM
            assert ((out.double() - expected).abs() <= bound).all()
            rows.append(out[0])
        assert all(torch.equal(row, rows[0]) for row in rows)


@pytest.mark.parametrize("tiles", [rule(FewRowsShape(2, 2880, 2880)), FewRowsTiles(8, 4, 128, products=True)])
def test_behind_a_running_launch(tiles: FewRowsTiles) -> None:
    """Norm and projection in turn, captured: what the launch before wrote last is what is read."""
    hidden = 2880
    weights = [torch.randn(hidden, hidden, device=GPU).bfloat16() / hidden**0.5 for _ in range(12)]
    scale = torch.rand(hidden, device=GPU).bfloat16()
    start = torch.randn(2, hidden, device=GPU).bfloat16()
    outs = [torch.empty_like(start) for _ in weights]

    def chain() -> None:
        x = start
        for weight, out in zip(weights, outs, strict=True):
            x = few_rows_linear(rms_norm(x, scale, 1e-5), weight, None, out, tiles)

    graph = capture([chain])
    for seed in range(20):
        start.copy_(torch.randn(2, hidden, generator=torch.Generator().manual_seed(seed)))
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        x = start
        for weight, out in zip(weights, outs, strict=True):
            expected = few_rows_linear(rms_norm(x, scale, 1e-5), weight, None, torch.empty_like(out), tiles)
            torch.cuda.synchronize()
            assert torch.equal(out, expected)
            x = out


def test_the_choice_launches_what_was_warmed_up(monkeypatch: pytest.MonkeyPatch, compiled: list[str]) -> None:
    """Chosen for up to 6 rows, other weights of the same sizes, a bias between 16 bytes: nothing compiles."""

    def chosen(num_rows: int, out_features: int, in_features: int, device: str) -> FewRowsTiles | None:
        return (
            FewRowsTiles(2, 4)
            if num_rows < 4
            else FewRowsTiles(8, 4, products=True)
            if num_rows < 7
            else None
        )

    monkeypatch.setattr(dense_linear, "select_few_rows", chosen)
    monkeypatch.setattr("lorikeet_kernels.warm_up_base.select_few_rows", chosen)
    weights = torch.randn(3, 264, 1000, device=GPU).bfloat16()
    biases = torch.randn(3 * 264 + 1, device=GPU).bfloat16()[1:].view(3, 264)
    assert warm_up_few_rows(weights[0], biases[0], dtype=torch.bfloat16, max_tokens=100) == 6
    compiled.clear()
    for num_rows in range(1, 9):
        x = torch.randn(num_rows, 1000, device=GPU).bfloat16()
        for weight, bias in zip(weights, biases, strict=True):
            expected = x.double() @ weight.double().T + bias.double()
            assert relative_error(linear(x, weight, bias), expected) < TOLERANCE[torch.bfloat16]
            assert (
                relative_error(linear(x[:, 1:], weight[:, 1:]), x[:, 1:].double() @ weight[:, 1:].double().T)
                < (TOLERANCE[torch.bfloat16])
            )
    assert compiled == []
