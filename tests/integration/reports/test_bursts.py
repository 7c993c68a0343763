"""A burst of calls is served or refused with a reason; none is dropped by the transport."""

import asyncio
from collections import Counter

import grpc
import pytest

from tests.support.stack import Stack

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]
# Above gRPC's own bound of 1000 calls that Python has not taken up, at which it cancels calls at random.
CALLS = 1500


@pytest.mark.long
async def test_more_calls_at_once_than_may_wait(copy_stack: Stack) -> None:
    """Each ends with its tokens or with RESOURCE_EXHAUSTED; the counters come back to rest."""
    stub = copy_stack.inference()

    async def outcome() -> str:
        try:
            done = await copy_stack.generate([5], stub=stub, max_tokens=1, timeout_s=300)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return f"tokens {done.token_ids}"

    found = Counter(await asyncio.gather(*(outcome() for _ in range(CALLS))))
    assert set(found) <= {"tokens [5]", "RESOURCE_EXHAUSTED"}, found
    assert found["tokens [5]"] > CALLS // 2, found
    status = await copy_stack.status()
    assert (status.running_requests, status.waiting_requests) == (0, 0)
