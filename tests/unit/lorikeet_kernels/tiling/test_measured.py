"""The switch between measured tiles and the rules alone."""

from collections.abc import Generator

import pytest

from lorikeet_kernels.tiling import OpShape, select_pair, select_shrink
from lorikeet_kernels.tiling.expert_tiles import MoeShape, select_experts
from lorikeet_kernels.tiling.few_rows_tiles import select_few_rows
from lorikeet_kernels.tiling.latent_tiles import projects_prompts
from lorikeet_kernels.tiling.lora_overlap import runs_beside
from lorikeet_kernels.tiling.measured import MEASURED, MeasuredTables
from lorikeet_kernels.tiling.router_tiles import select_router
from tests.support.runner import make_backend

H200, UNMEASURED = "NVIDIA H200", "a card without a table"
GATE_UP = OpShape("gate_up", 2880, 5760, 16, 64)
EXPERTS = MoeShape("mxfp4", 2880, 2880, 32, 128)
WHOLE = MoeShape("fp8_block", 1024, 384, 8, 8 * 100)  # of no table: the rule's specialized warps


@pytest.fixture(autouse=True)
def turned_back() -> Generator[None]:
    """The switch is the process's."""
    yield
    MEASURED.use(wanted=True)


def by_name(device: str) -> tuple[object, ...]:
    """One of each set of devices that have no table."""
    return (
        select_router(1, 32, 2880, device),
        select_experts(WHOLE, device),
        projects_prompts(device),
        runs_beside(device, None),
    )


def choices(device: str) -> tuple[object, ...]:
    """One of each table's."""
    return (
        select_pair(GATE_UP, device),
        select_shrink(OpShape("gate_up", 2880, 5760, 8192, 32), 16, device),
        select_experts(EXPERTS, device),
        select_few_rows(1, 5120, 2880, device),
        *by_name(device),
    )


def test_without_tables_every_device_is_one_that_was_not_measured() -> None:
    """Also for shapes that were asked for before; turned back, they are as measured again."""
    measured = choices(H200)
    assert measured != choices(UNMEASURED)
    assert all(mine != other for mine, other in zip(by_name(H200), by_name(UNMEASURED), strict=True))
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


def test_it_is_not_turned_under_who_uses_it() -> None:
    """Who was built one way keeps it; setting it to what it is is no turn, and the dead hold nothing."""

    class Engine:
        pass

    tables, engine = MeasuredTables(), Engine()
    tables.keep_for(engine)
    tables.use(wanted=True)
    with pytest.raises(RuntimeError, match="another backend"):
        tables.use(wanted=False)
    assert tables.are_used
    del engine
    tables.use(wanted=False)
    assert not tables.are_used
