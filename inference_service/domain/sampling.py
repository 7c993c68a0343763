"""How a request's tokens are chosen, after defaults were filled in and limits checked at the edge."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved sampling parameters; nothing here is optional-by-zero.

    `temperature` 0 is greedy. `top_k` 0 keeps all. `logprobs` None asks for none, 0 for the chosen token's
    only, n for the n most likely beside it. `stop_token_ids` already holds the model's end-of-sequence tokens
    unless the request ignores them.
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
