"""The churn takes turns, however few adapters there are."""

import time
from pathlib import Path

import pytest

from lorikeet_bench.soak.churn import Churner
from lorikeet_bench.soak.contents import Content, ContentKind, ContentPool
from lorikeet_bench.soak.journal import Journal
from lorikeet_bench.soak.operations import Operations
from lorikeet_bench.soak.outage import Outage
from lorikeet_bench.soak.roster import Roster
from lorikeet_bench.soak.tally import Tally
from lorikeet_client import AsyncLorikeet


@pytest.mark.asyncio
async def test_a_churner_waits_while_others_have_all_adapters(tmp_path: Path) -> None:
    """It neither fails nor touches an adapter that another one changes."""
    contents = [
        Content(tmp_path, kind, token, f"{kind}-{token}") for kind in ContentKind for token in range(1, 9)
    ]
    roster = Roster("demo", 1, ContentPool(contents))
    tally = Tally(lambda _: None)
    async with AsyncLorikeet("127.0.0.1:1", "127.0.0.1:1", "token") as client, roster.members[0].lock:
        operations = Operations(client, Journal(), tally, Outage("manager", "127.0.0.1:1"))
        churner = Churner(1, 0, roster, operations, pause_s=0.001)
        await churner.run(time.monotonic() + 0.05)
    assert not tally.churn
