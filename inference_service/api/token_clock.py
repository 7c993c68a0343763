"""When one request's tokens came."""

import time

from inference_service.ports import TokenObserver


class TokenClock:
    """Measures from a request's arrival to its first token, and from token to token.

    Args:
        arrived_s: on the clock of `time.perf_counter`.
        observer: hears of each token.
    """

    def __init__(self, arrived_s: float, observer: TokenObserver) -> None:
        self.first_token_ms: float | None = None
        self._last_s = arrived_s
        self._observer = observer

    def came(self, num_tokens: int) -> bool:
        """Tokens came, together; whether the first is among them.

        Those of one step share the time since the step before.
        """
        if not num_tokens:
            return False
        now_s = time.perf_counter()
        since_s, self._last_s = now_s - self._last_s, now_s
        is_first = self.first_token_ms is None
        if is_first:
            self.first_token_ms = round(since_s * 1000, 3)
            self._observer.first_token(since_s)
            num_tokens, since_s = num_tokens - 1, 0.0
        if num_tokens:
            self._observer.next_tokens(since_s / num_tokens, num_tokens)
        return is_first
