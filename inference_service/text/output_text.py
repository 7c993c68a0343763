"""A request's output tokens to the text that its client sees: detokenizer, then stop strings."""

from inference_service.domain.sampling import SamplingParams
from inference_service.text.detokenizer import Detokenizer
from inference_service.text.stop_strings import StopScan, StopStringMatcher
from inference_service.text.tokenizer import Tokenizer


class OutputText:
    """One request's text. Every token has its text, special ones aside where the request skips them."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._num_unstoppable = sampling.min_tokens
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens)
        self._matcher = StopStringMatcher(
            sampling.stop_strings, include_stop_string=sampling.include_stop_string
        )

    def push(self, token_id: int) -> StopScan:
        """Take one token; `stop_string` set means that this token completed it and the request is over.

        None of the first `min_tokens` tokens completes one.
        """
        may_stop = self._num_unstoppable <= 0
        self._num_unstoppable -= 1
        return self._matcher.push(self._detokenizer.push(token_id), may_stop=may_stop)

    def finish(self) -> StopScan:
        """The rest, when the request ended by itself; a cut character's U+FFFD may complete a stop string."""
        last = self._matcher.push(self._detokenizer.finish(), may_stop=self._num_unstoppable < 0)
        if last.stop_string is not None:
            return last
        return StopScan(last.text + self._matcher.finish())
