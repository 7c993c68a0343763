"""A metered stack over the exact rigs, shared by the tests that only look."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from lorikeet_bench import rigs
from tests.support.metered_stack import MeteredStack


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def metered(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeteredStack]:
    """The copy base with demo/w10, which answered one request and so is on the device."""
    root = tmp_path_factory.mktemp("metered")
    base = rigs.write_copy_base(root / "copy")
    async with MeteredStack(base, root / "stack", node_flags=["--model-name", "rig"]) as stack:
        await stack.upload(rigs.write_moe_watermark(root / "w10", 10), "demo/w10", aliases=["prod"])
        await stack.generate([1, 2, 3], adapter="demo/w10", max_tokens=4)
        yield stack
