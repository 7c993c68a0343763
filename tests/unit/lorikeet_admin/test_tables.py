"""The small formatters."""

import pytest

from lorikeet_admin.output import size
from lorikeet_admin.tables import layer_ranges, short_name


@pytest.mark.parametrize(
    ("layers", "shown"),
    [([], ""), ([None], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([5, 0, 1, 3], "0-1, 3, 5"), ([2, 2], "2")],
)
def test_layer_ranges(layers: list[int | None], shown: str) -> None:
    """Runs fold; None (outside the layers) is nothing."""
    assert layer_ranges(layers) == shown


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 20, "5.0 MiB"), (3 << 50, "3072.0 TiB")],
)
def test_size(num_bytes: int, shown: str) -> None:
    """Binary units, the largest that fits."""
    assert size(num_bytes) == shown


def test_short_name() -> None:
    """Resource names shorten; anything else stays."""
    assert short_name("tenants/t/adapters/a/revisions/" + "0" * 64) == "t/a"
    assert short_name("not a name") == "not a name"
