"""Stacks over the exact rigs, one a session, shared by the tests that leave them as they found them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from lorikeet_bench import rigs
from tests.support.stack import Stack


@pytest.fixture(scope="session")
def rig_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for rigs."""
    return tmp_path_factory.mktemp("rigs")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def copy_stack(rig_root: Path) -> AsyncIterator[Stack]:
    """The copy base with watermark adapters demo/w10 and demo/w20 uploaded."""
    base = rigs.write_copy_base(rig_root / "copy")
    async with Stack(base, rig_root / "copy-stack") as stack:
        for token in (10, 20):
            await stack.upload(rigs.write_moe_watermark(rig_root / f"w{token}", token), f"demo/w{token}")
            await stack.wait_known(f"demo/w{token}")
        yield stack
