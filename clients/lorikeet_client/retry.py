"""When and how often a failed call is tried again; the same for the blocking and the asyncio client."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from tenacity import RetryCallState, retry_if_exception, stop_after_attempt, stop_before_delay
from tenacity.retry import retry_base
from tenacity.stop import stop_base
from tenacity.wait import wait_random_exponential

from lorikeet_client.errors import UnavailableError

OnRetry = Callable[[UnavailableError, float], object]
"""(what failed, the pause before the next try in seconds)"""


def ignore_retry(error: UnavailableError, pause_s: float) -> None:
    """For who need not hear of it."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds of the tries of one call. The server's own RetryInfo overrules the waits, not the bounds."""

    max_attempts: int = 4
    first_wait_s: float = 0.2
    max_wait_s: float = 5.0


DEFAULT_RETRY = RetryPolicy()


@dataclass(frozen=True, slots=True)
class Budget:
    """What is left of a call's time over all its tries."""

    deadline_s: float | None

    @classmethod
    def start(cls, timeout_s: float | None) -> "Budget":
        """Begin now; None never ends."""
        return cls(None if timeout_s is None else time.monotonic() + timeout_s)

    def left_s(self) -> float | None:
        """Seconds left, at least a millisecond so that a call fails with a status of its own."""
        return None if self.deadline_s is None else max(self.deadline_s - time.monotonic(), 0.001)


class RetryArguments(TypedDict):
    """What tenacity's Retrying and AsyncRetrying take."""

    retry: retry_base
    stop: stop_base
    wait: Callable[[RetryCallState], float]
    before_sleep: Callable[[RetryCallState], None]
    reraise: bool


def server_says_when(error: BaseException) -> bool:
    """UNAVAILABLE with RetryInfo: draining or restarting, so another try helps."""
    return isinstance(error, UnavailableError) and error.retry_after_s is not None


def is_unavailable(error: BaseException) -> bool:
    """UNAVAILABLE of any kind: enough for work that resumes where it stopped."""
    return isinstance(error, UnavailableError)


def retry_arguments(
    policy: RetryPolicy,
    retryable: Callable[[BaseException], bool],
    timeout_s: float | None,
    on_retry: OnRetry = ignore_retry,
) -> RetryArguments:
    """Try while `retryable`, within the policy's attempts, and never wait past the call's own timeout."""
    backoff = wait_random_exponential(multiplier=policy.first_wait_s, max=policy.max_wait_s)

    def wait(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        told_s = error.retry_after_s if isinstance(error, UnavailableError) else None
        return backoff(state) if told_s is None else told_s

    def tell(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, UnavailableError):
            on_retry(error, state.upcoming_sleep)

    stop: stop_base = stop_after_attempt(policy.max_attempts)
    if timeout_s is not None:
        stop = stop | stop_before_delay(timeout_s)
    return RetryArguments(
        retry=retry_if_exception(retryable), stop=stop, wait=wait, before_sleep=tell, reraise=True
    )
