"""Worker threads end whenever they like, also between two looks at them."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from tests.support.engine_builders import make_request, unload, with_adapters
from tests.support.fake_device import expected_tokens


class EndsWhenAsked(Future[Any]):
    """Its job ends right after somebody found that it had not."""

    def __init__(self, job: Callable[[], Any]) -> None:
        super().__init__()
        self._job: Callable[[], Any] | None = job

    def done(self) -> bool:
        """False once, and over from then on."""
        was_done = super().done()
        if self._job is not None:
            job, self._job = self._job, None
            self.set_result(job())
        return was_done


def test_a_read_that_ends_while_it_is_asked_about_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its revision would be loading for ever: requests for it fail, its unload hangs."""
    rig, (digest,) = with_adapters(1)
    monkeypatch.setattr(rig.executor, "submit", lambda fn, *args: EndsWhenAsked(lambda: fn(*args)))
    rig.add(make_request("a", digest=digest))
    rig.run(max_turns=30)
    assert rig.tokens("a") == expected_tokens(digest, (1, 2, 3), 4)
    ends = unload(rig, digest, keep_on_disk=False)
    room: list[bool] = []
    rig.residency.make_disk_room(10, room.append)
    for _ in range(6):
        rig.turn()
    assert ends == [True]
    assert len(room) == 1
    assert not rig.residency._loads.is_busy
