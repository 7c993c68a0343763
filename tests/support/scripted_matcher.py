"""A matcher whose allowed tokens are a function of the output so far, in place of llguidance's."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

END = 2


class ScriptedMatcher:
    """Implements domain.structured_output.TokenMatcher; `allowed` None is an error."""

    def __init__(
        self, allowed: Callable[[tuple[int, ...]], Collection[int] | None], output: tuple[int, ...] = ()
    ) -> None:
        self.allowed = allowed
        self.output = output

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """One."""
        return (END,)

    @property
    def num_tokens(self) -> int:
        """Of the output so far."""
        return len(self.output)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Every token must be a real one."""
        assert all(token_id >= 0 for token_id in token_ids), token_ids
        self.output += tuple(token_ids)

    def fill_masks(self, matchers: "Sequence[ScriptedMatcher]", out: Any) -> None:
        """A bit at a time."""
        out[:] = 0
        for row, matcher in enumerate(matchers):
            for token_id in matcher.allowed(matcher.output) or ():
                out[row].view(np.uint32)[token_id // 32] |= np.uint32(1 << (token_id % 32))

    def error(self) -> str:
        """Where the script has none."""
        return "out of fuel" if self.allowed(self.output) is None else ""
