"""Tasks that ignore a cancellation, as Python 3.11's `wait_for` makes them do at times."""

import asyncio
from typing import Any, cast

import pytest

from adapter_manager.server import _until_signal
from lorikeet_rpc.ending import end_tasks


class Deaf:
    """A task that takes a number of cancellations for nothing, and then counts as cancelled."""

    def __init__(self, num_ignored: int) -> None:
        self._num_ignored = num_ignored
        self.num_heard = 0
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.num_heard += 1
                if self.num_heard > self._num_ignored:
                    raise


@pytest.mark.parametrize("num_ignored", [0, 1, 3])
async def test_tasks_are_cancelled_until_they_end(num_ignored: int) -> None:
    """Each as often as it takes, beside one that ended and one that failed."""
    deaf, willing = Deaf(num_ignored), Deaf(0)

    async def fail() -> None:
        raise ValueError

    ended, failed = asyncio.create_task(asyncio.sleep(0)), asyncio.create_task(fail())
    await asyncio.wait((ended, failed))
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await end_tasks((deaf.task, willing.task, ended, failed))
    assert deaf.task.cancelled()
    assert (deaf.num_heard, willing.num_heard) == (num_ignored + 1, 1)
    await end_tasks(())


class _Stopped:
    """A manager whose server has had its signal."""

    class server:  # noqa: N801 (stands for an attribute)
        """The one call that is made of it."""

        @staticmethod
        async def serve_until_signal(*_: object) -> None:
            """Over at once."""
            await asyncio.sleep(0)

    class interceptor:  # noqa: N801 (stands for an attribute)
        """What a drain waits for."""

        idle = None


async def test_a_manager_ends_though_one_of_its_tasks_lost_its_cancellation() -> None:
    """The store answered in the moment of the cancellation."""
    deaf = Deaf(1)
    async with asyncio.timeout(60):
        await _until_signal(cast("Any", _Stopped), [deaf.task], 0.0)
    assert deaf.task.cancelled()
