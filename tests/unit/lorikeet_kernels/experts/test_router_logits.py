"""Router logits in parts: the kernel in the interpreter, the reference, what is refused, the choice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lorikeet_kernels.experts.router_logits import (
    LogitParts,
    router_in_parts,
    router_logits,
    router_logits_reference,
)
from lorikeet_kernels.experts.routing import route_softmax
from lorikeet_kernels.testing import TOLERANCE, relative_error
from lorikeet_kernels.tiling import router_tiles
from lorikeet_kernels.tiling.router_tiles import MAX_ROWS, MAX_SPLITS, RouterTiles, select_router

BF16 = torch.bfloat16


@pytest.mark.long  # half a minute
def test_kernels_under_the_interpreter() -> None:
    """See interpreted_router.py for what it covers."""
    script = Path(__file__).with_name("interpreted_router.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_reference_adds_up_to_the_projection(dtype: torch.dtype) -> None:
    """And routes as its sum does."""
    x, weight, bias = torch.randn(7, 300).to(dtype), torch.randn(13, 300).to(dtype), torch.randn(13).to(dtype)
    parts = router_logits_reference(x, weight, bias, RouterTiles(128, 4))
    assert parts.parts.shape == (3, 7, 13)
    exact = x.double() @ weight.double().T + bias.double()
    assert relative_error(parts.whole(), exact) < TOLERANCE[dtype]
    got = route_softmax(parts, 4, renormalize=True)
    expected = route_softmax(parts.whole(), 4, renormalize=True)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_parts_add_up_in_order() -> None:
    """The order decides what is left of a small number between two large ones."""
    parts = torch.tensor([1e8, 1.0, -1e8]).view(3, 1, 1)
    assert float(LogitParts(parts, None, torch.float32).whole()) == 0.0
    assert float(LogitParts(parts[[0, 2, 1]], torch.ones(1), torch.float32).whole()) == 2.0


def test_what_is_refused() -> None:
    """Too many rows or experts, other dtypes, other widths, strides."""
    weight, tiles = torch.zeros(8, 64, dtype=BF16), RouterTiles(32, 4)
    for x, matrix in (
        (torch.zeros(MAX_ROWS + 1, 64, dtype=BF16), weight),
        (torch.zeros(1, 64, dtype=BF16), torch.zeros(257, 64, dtype=BF16)),
        (torch.zeros(1, 64), weight),
        (torch.zeros(1, 32, dtype=BF16), weight),
        (torch.zeros(64, 2, dtype=BF16).T, weight),
    ):
        with pytest.raises(ValueError, match="router_logits"):
            router_logits(x, matrix, None, tiles)


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on a CPU, nor before it was measured; then up to so many rows, which change no tiles."""
    assert router_in_parts(torch.zeros(1, 64, dtype=BF16), torch.zeros(8, 64, dtype=BF16), None) is None
    monkeypatch.setattr(router_tiles, "MOST_ROWS", {"a card": 32})
    assert select_router(1, 32, 2880, "another card") is None
    assert select_router(33, 32, 2880, "a card") is None
    assert select_router(1, 300, 2880, "a card") is None
    assert select_router(1, 32, 2881, "a card") is None
    for hidden in (64, 2048, 2880, 7168, 100_000):
        chosen = {select_router(rows, 32, hidden, "a card") for rows in (1, 17, 32)}
        assert len(chosen) == 1
        tiles = chosen.pop()
        assert tiles is not None
        assert -(-hidden // tiles.columns) <= MAX_SPLITS
