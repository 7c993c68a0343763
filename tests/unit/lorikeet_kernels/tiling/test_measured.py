"""The switch between measured tiles and the rules alone."""

from collections.abc import Generator

import pytest

from lorikeet_kernels.tiling import OpShape, select_pair, select_shrink
from lorikeet_kernels.tiling.expert_tiles import MoeShape, select_experts
from lorikeet_kernels.tiling.few_rows_tiles import select_few_rows
from lorikeet_kernels.tiling.measured import MEASURED
from lorikeet_kernels.tiling.router_tiles import select_router
from tests.support.runner import make_backend

H200, UNMEASURED = "NVIDIA H200", "a card without a table"
GATE_UP = OpShape("gate_up", 2880, 5760, 16, 64)
EXPERTS = MoeShape("mxfp4", 2880, 2880, 32, 128)


@pytest.fixture(autouse=True)
def turned_back() -> Generator[None]:
    """The switch is the process's."""
    yield
    MEASURED.use(wanted=True)


def choices(device: str) -> tuple[object, ...]:
    """One of each table's."""
    return (
        select_pair(GATE_UP, device),
        select_shrink(OpShape("gate_up", 2880, 5760, 8192, 32), 16, device),
        select_experts(EXPERTS, device),
        select_few_rows(1, 5120, 2880, device),
        select_router(1, 32, 2880, device),
    )


def test_without_tables_every_device_is_one_that_was_not_measured() -> None:
    """Also for shapes that were asked for before; turned back, they are as measured again."""
    measured = choices(H200)
    assert measured != choices(UNMEASURED)
    MEASURED.use(wanted=False)
    assert choices(H200) == choices(UNMEASURED)
    MEASURED.use(wanted=True)
    assert choices(H200) == measured


def test_a_backend_says_which() -> None:
    """Each sets what its own settings say; the default is the tables."""
    make_backend(tile_tables=False)
    assert not MEASURED.are_used
    make_backend()
    assert MEASURED.are_used
