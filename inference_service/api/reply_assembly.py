"""One sample's engine outputs made into the pieces that its client sees."""

from collections.abc import Iterator

from inference_service.api.generation_piece import (
    GenerationFinish,
    GenerationPiece,
    ServedAdapter,
    TokenPiece,
)
from inference_service.domain.request import FinishReason, RequestFinish, RequestOutput, TokenLogprobs
from inference_service.domain.sampling import SamplingParams
from inference_service.text.output_text import OutputText
from inference_service.text.tokenizer import Tokenizer

# Well below a millisecond's work: other streams go on in between.
_PROMPT_TOKENS_AT_ONCE = 256


class ReplyAssembly:
    """Text, tokens and finish of one sample. The engine's finish ends it, whatever stopped the text.

    The prompt is in the usage of sample 0 alone, so that the samples' usages add up to the request's.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        adapter: ServedAdapter | None,
        index: int = 0,
    ) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._prompt_token_ids = prompt_token_ids
        self._adapter = adapter
        self._text = OutputText(tokenizer, sampling)
        self._shows_stop = sampling.include_stop_string
        self._stop_string = ""
        self.num_output_tokens = 0
        self.finish: GenerationFinish | None = None

    @property
    def is_stopped(self) -> bool:
        """A stop string was found: tokens from here on are nobody's."""
        return bool(self._stop_string)

    def prompt_pieces(self, output: RequestOutput) -> Iterator[GenerationPiece]:
        """The output's prompt tokens, a part at a time; they come before what `push` makes of it."""
        for begin in range(0, len(output.prompt_logprobs), _PROMPT_TOKENS_AT_ONCE):
            part = slice(begin, begin + _PROMPT_TOKENS_AT_ONCE)
            tokens = zip(self._prompt_token_ids[part], output.prompt_logprobs[part], strict=True)
            yield GenerationPiece(prompt_tokens=tuple(self._piece(i, entry) for i, entry in tokens))

    def push(self, output: RequestOutput) -> GenerationPiece | None:
        """Take one output; None where it brings the client nothing beside its prompt tokens."""
        text, tokens = "", []
        for index, token_id in enumerate(output.token_ids):
            if self.is_stopped:
                break
            tokens.append(self._piece(token_id, output.logprobs[index] if output.logprobs else None))
            if self._hides(output, index):
                continue
            scan = self._text.push(token_id)
            text += scan.text
            self._stop_string = scan.stop_string or ""
        self.num_output_tokens += len(tokens)
        if output.finish is not None:
            text += self._end(output.finish)
        if not (text or tokens or self.finish):
            return None
        return GenerationPiece(text, tuple(tokens), finish=self.finish, index=self._index)

    def _hides(self, output: RequestOutput, index: int) -> bool:
        """The token that stopped the request: its id is reported, its text is not, as in vLLM."""
        ends_here = output.finish is not None and output.finish.stop_token_id is not None
        return ends_here and index == len(output.token_ids) - 1 and not self._shows_stop

    def _end(self, finish: RequestFinish) -> str:
        """Fix the finish; returns the text that was held back."""
        text = ""
        if not self.is_stopped:
            rest = self._text.finish()
            text, self._stop_string = rest.text, rest.stop_string or ""
        self.finish = GenerationFinish(
            reason=FinishReason.STOP_STRING if self.is_stopped else finish.reason,
            stop_string=self._stop_string,
            stop_token_id=None if self.is_stopped else finish.stop_token_id,
            prompt_tokens=0 if self._index else finish.prompt_tokens or len(self._prompt_token_ids),
            cached_tokens=0 if self._index else finish.cached_tokens,
            output_tokens=self.num_output_tokens,
            timings=finish.timings,
            adapter=self._adapter,
            tier_hit=finish.tier_hit,
        )
        return text

    def _piece(self, token_id: int, entry: TokenLogprobs | None) -> TokenPiece:
        return TokenPiece(token_id, self._tokenizer.token_bytes(token_id), entry)
