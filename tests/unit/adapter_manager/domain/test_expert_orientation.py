"""Which side of a square expert parameter lora_A is on: the table of versions, cell by cell."""

import pytest

from adapter_manager.domain.expert_orientation import orientation_by_version, orientations_that_fit
from adapter_manager.domain.layout_options import ExpertOrientation
from lorikeet_contract.schema import ParameterLayout
from tests.support.lora_schemas import experts

STANDARD, EXCHANGED = ExpertOrientation.STANDARD, ExpertOrientation.EXCHANGED
OUT_IN, IN_OUT = ParameterLayout.OUT_IN, ParameterLayout.IN_OUT


@pytest.mark.parametrize(
    ("layout", "is_interleaved", "version", "expected", "is_certain"),
    [
        (OUT_IN, False, None, None, False),
        (OUT_IN, False, (0, 18, 1), EXCHANGED, True),
        (OUT_IN, False, (0, 19, 0), EXCHANGED, True),
        (OUT_IN, False, (0, 19, 1), STANDARD, True),
        (OUT_IN, False, (0, 21, 2), STANDARD, True),
        (IN_OUT, True, None, STANDARD, False),
        (IN_OUT, True, (0, 18, 1), STANDARD, True),
        (IN_OUT, True, (0, 19, 0), None, False),
        (IN_OUT, True, (0, 19, 1), STANDARD, False),
        (IN_OUT, True, (0, 21, 2), STANDARD, False),
        (IN_OUT, False, (0, 18, 1), STANDARD, True),
        (IN_OUT, False, (0, 19, 0), STANDARD, True),
        (IN_OUT, False, (0, 19, 1), EXCHANGED, True),
    ],
)
def test_table(
    layout: ParameterLayout,
    is_interleaved: bool,
    version: tuple[int, ...] | None,
    expected: ExpertOrientation | None,
    is_certain: bool,
) -> None:
    """What the PEFT version says where shapes say nothing."""
    verdict = orientation_by_version(layout, is_interleaved, version)
    assert (verdict.orientation, verdict.is_certain) == (expected, is_certain)


def test_shapes_decide_unless_square() -> None:
    """One orientation fits, both, or none."""
    gate_up, down = experts(0, 4, 32, 32, "m.experts", "m.experts")
    assert orientations_that_fit(gate_up, 32, 64) == (STANDARD,)
    assert orientations_that_fit(gate_up, 64, 32) == (EXCHANGED,)
    assert orientations_that_fit(gate_up, 32, 32) == ()
    assert orientations_that_fit(down, 32, 32) == (STANDARD, EXCHANGED)
