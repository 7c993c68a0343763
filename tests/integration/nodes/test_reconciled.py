"""A node that lagged and has caught up is said to, once."""

from pathlib import Path
from typing import Any

import structlog

from lorikeet_contract.names import AdapterName
from tests.support.node_stack import ACTIVE, DEMO, stack, tier
from tests.support.waiting import eventually


def reconciled(events: list[Any]) -> list[dict[str, Any]]:
    """Those events."""
    return [event for event in events if event["event"] == "residency.reconciled"]


async def test_catching_up_is_told_once(tmp_path: Path) -> None:
    """Nothing at a start with nothing to do; after a pin the load, then one line with the generation."""
    with structlog.testing.capture_logs() as events:
        async with stack(tmp_path) as (parts, (node,)):
            revision, _ = await parts.push("demo/a", "one")
            await eventually(lambda: node.names() == {"demo/a": revision.digest}, 20)
            assert not reconciled(events)
            await parts.adapters.pin(DEMO, "a", True, "")  # noqa: FBT003
            await eventually(lambda: tier(node, revision.digest) == ACTIVE, 20)
            await eventually(lambda: reconciled(events), 20)
            assert parts.mirror.view.adapters[AdapterName("demo", "a").short].is_pinned
            await parts.push("demo/b", "two")
            await eventually(lambda: "demo/b" in node.names(), 20)
    (told,) = reconciled(events)
    assert told["node"] == node.address
    assert told["log_level"] == "info"
