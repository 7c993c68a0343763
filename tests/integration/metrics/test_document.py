"""docs/metrics.md lists what the running services export, neither more nor less."""

import pytest

from tests.support.metered_stack import MeteredStack
from tests.support.metrics_table import documented
from tests.support.scrapes import OPENMETRICS, Scrape

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("accept", [None, OPENMETRICS], ids=["text", "openmetrics"])
async def test_the_tables_are_what_is_exported(metered: MeteredStack, accept: str | None) -> None:
    """Names and types, on both services; labels of whatever has samples."""
    for service, read in (("node", metered.node_scrape), ("manager", metered.manager_scrape)):
        rows, found = documented(service), await read(accept)
        assert {name: family.type for name, family in found.families.items()} == {
            name: row.type for name, row in rows.items()
        }
        for name, row in rows.items():
            for labels in _labels(found, name):
                assert labels == row.labels, name


def _labels(found: Scrape, name: str) -> set[frozenset[str]]:
    return {frozenset(sample.labels) - {"le"} for sample in found.families[name].samples}
