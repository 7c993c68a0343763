"""A stack with files around it that no upload may touch, and the check after every test that none did."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from lorikeet_bench import rigs
from tests.support.enclosed_stack import EnclosedStack


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def enclosed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EnclosedStack]:
    """A stack for uploads that must leave no trace."""
    async with EnclosedStack.running(tmp_path_factory.mktemp("enclosed")) as running:
        yield running


@pytest.fixture(autouse=True)
def _untouched(enclosed: EnclosedStack, tmp_path: Path) -> Iterator[None]:
    """After every test the world outside is what it was, and the stores hold what they held."""
    before = enclosed.snapshot()
    yield
    assert enclosed.snapshot() == before
    assert not (tmp_path / "marker").exists()
    assert enclosed.stack.manager.popen
    assert enclosed.stack.manager.popen.poll() is None


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A sound adapter."""
    return rigs.write_moe_watermark(tmp_path / "adapter", 20)
