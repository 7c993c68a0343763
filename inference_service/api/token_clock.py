"""When one request's tokens came, of all its samples."""

import time

from inference_service.ports import TokenObserver


class TokenClock:
    """Measures from a request's arrival to its first token, and from token to token of each sample.

    Args:
        arrived_s: on the clock of `time.perf_counter`.
        observer: hears of each token.
    """

    def __init__(self, arrived_s: float, observer: TokenObserver) -> None:
        self.first_token_ms: float | None = None
        self._arrived_s = arrived_s
        self._last_s: dict[int, float] = {}
        self._observer = observer

    def came(self, num_tokens: int, index: int = 0) -> bool:
        """Tokens of a sample came, together; whether the request's first is among them.

        Those of one step share the time since the step before. A sample's first token has none before it.
        """
        if not num_tokens:
            return False
        now_s = time.perf_counter()
        last_s, self._last_s[index] = self._last_s.get(index), now_s
        is_first = self.first_token_ms is None
        if is_first:
            self.first_token_ms = round((now_s - self._arrived_s) * 1000, 3)
            self._observer.first_token(now_s - self._arrived_s)
        if last_s is None:
            num_tokens, since_s = num_tokens - 1, 0.0
        else:
            since_s = now_s - last_s
        if num_tokens:
            self._observer.next_tokens(since_s / num_tokens, num_tokens)
        return is_first
