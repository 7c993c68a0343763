"""How a request's tokens are chosen, after defaults were filled in and limits checked at the edge."""

from dataclasses import dataclass

from inference_service.domain.structured_output import StructuredOutput


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved sampling parameters; nothing here is optional-by-zero.

    `temperature` 0 is greedy. `top_k` 0 keeps all. `logprobs` None asks for none, 0 for the chosen token's
    only, n for the n most likely beside it; they are of the model's own logits, before anything here changes
    them. `stop_token_ids` already holds the model's end-of-sequence tokens unless the request ignores them.

    Logits become a choice in this order, which is vLLM's: `bad_words` and `held_back_token_ids` (these until
    `min_tokens` are out) are masked, `logit_bias` is added, then come the penalties (`repetition_penalty`
    over prompt and output, the others over the output), the mask of `structured_output`, temperature,
    `min_p`, `top_k`, `top_p`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    held_back_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    structured_output: StructuredOutput | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether what was said before matters."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before temperature; else the model's own are sampled as they are."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.min_tokens
            or self.bad_words
            or self.structured_output is not None
        )

    @property
    def waits_for_tokens(self) -> bool:
        """Whether the host must know all tokens so far to say how the next one's logits change."""
        return self.structured_output is not None or any(len(word) > 1 for word in self.bad_words)
