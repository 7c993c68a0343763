"""Prompts of a planned length: random token ids, or random words."""

from collections.abc import Iterable

import numpy as np

from lorikeet_bench.load.plan import PlannedRequest

_LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))
_WORD_LETTERS = 4


class TokenPrompts:
    """Token ids drawn uniformly from [low, high), so that no prefix is shared.

    `prepare` makes them ahead, so that drawing takes no time of the measured part.
    """

    def __init__(self, low: int, high: int) -> None:
        assert low < high
        self._low, self._high = low, high
        self._made: dict[tuple[int, int], tuple[int, ...]] = {}

    def prepare(self, requests: Iterable[PlannedRequest]) -> None:
        """Draw these requests' prompts now."""
        for request in requests:
            self._made[request.prompt_seed] = self._draw(request)

    def ids(self, request: PlannedRequest) -> tuple[int, ...]:
        """The prompt [input_tokens], the same at each call."""
        return self._made.get(request.prompt_seed) or self._draw(request)

    def _draw(self, request: PlannedRequest) -> tuple[int, ...]:
        rng = np.random.default_rng(request.prompt_seed)
        return tuple(rng.integers(self._low, self._high, request.input_tokens).tolist())


class TextPrompts:
    """Words of four random letters; `words_per_token` is measured on the server's own tokenizer."""

    def __init__(self, words_per_token: float = 1.0) -> None:
        self.words_per_token = words_per_token

    def sample(self, num_words: int) -> str:
        """Text to measure a tokenizer with."""
        return self._words(np.random.default_rng(0), num_words)

    def text(self, request: PlannedRequest) -> str:
        """A prompt of about `input_tokens` tokens; the reply's usage says how many it had."""
        count = max(1, round(request.input_tokens * self.words_per_token))
        return self._words(np.random.default_rng(request.prompt_seed), count)

    def _words(self, rng: np.random.Generator, count: int) -> str:
        letters = _LETTERS[rng.integers(0, len(_LETTERS), (count, _WORD_LETTERS))]
        return " ".join("".join(word) for word in letters)
