"""One fake server a test, and both clients behind one asyncio face so that each test covers both."""

import asyncio
import inspect
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from lorikeet_client import AsyncLorikeet, Lorikeet, RetryPolicy
from tests.support.fake_services import TOKEN, FakeServices, fake_services

FAST = RetryPolicy(max_attempts=3, first_wait_s=0.001, max_wait_s=0.002)


@pytest.fixture
def fakes() -> Generator[FakeServices]:
    """The server."""
    with fake_services() as running:
        yield running


class Both:
    """Calls a method of either client and gives its result, streams and iterators read to the end."""

    def __init__(self, client: Any) -> None:
        self.client = client

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run the method."""
        if isinstance(self.client, AsyncLorikeet):
            result = getattr(self.client, method)(*args, **kwargs)
            if inspect.isawaitable(result):
                return await result
            return [item async for item in result]

        def run() -> Any:
            result = getattr(self.client, method)(*args, **kwargs)
            return list(result) if isinstance(result, Iterator) else result

        return await asyncio.to_thread(run)


@pytest.fixture(params=["blocking", "asyncio"])
async def both(request: pytest.FixtureRequest, fakes: FakeServices) -> Any:
    """Each test that takes this runs with both clients."""
    if request.param == "asyncio":
        async with AsyncLorikeet(fakes.address, fakes.address, TOKEN, retry=FAST) as client:
            yield Both(client)
    else:
        with Lorikeet(fakes.address, fakes.address, TOKEN, retry=FAST) as client:
            yield Both(client)
