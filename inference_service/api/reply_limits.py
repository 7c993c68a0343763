"""What fits one reply, and the errors for what does not."""

from inference_service.api.field_errors import limit_error
from inference_service.api.generation_piece import MAX_REPLY_BYTES
from inference_service.api.generation_request import GenerationRequest
from inference_service.domain.errors import LimitExceededError

# Of a token in TokenizeResponse: a byte of its id; tag and length of its bytes.
MAX_TOKENIZE_TOKENS = MAX_REPLY_BYTES // 3
# (id, logprob) pairs of one prompt: 64 MB in the engine, which has them all before the first is sent.
MAX_PROMPT_LOGPROB_PAIRS = 8_000_000


def check_complete_fits(request: GenerationRequest, num_prompt_tokens: int) -> None:
    """Refuse what cannot fit one reply, if all its samples run to `max_tokens` where it has any.

    At least 8 bytes a token and 9 a log-probability. The prompt's first token has no log-probabilities.

    Raises:
        LimitExceededError: with what to do instead.
    """
    sampling = request.sampling
    least = sampling.num_samples * (sampling.max_tokens or 0) * (8 + 9 * (sampling.params.logprobs or 0))
    if (top := sampling.params.prompt_logprobs) is not None:
        least += max(0, num_prompt_tokens - 1) * (8 + 9 * top)
    if least > MAX_REPLY_BYTES:
        raise reply_too_large(least)


def check_prompt_logprobs(request: GenerationRequest, num_prompt_tokens: int) -> None:
    """Bound the log-probabilities of one prompt, however they are sent.

    Raises:
        LimitExceededError: with how many alternatives this prompt may have.
    """
    top = request.sampling.params.prompt_logprobs or 0
    if num_prompt_tokens * top > MAX_PROMPT_LOGPROB_PAIRS:
        most = MAX_PROMPT_LOGPROB_PAIRS // num_prompt_tokens
        raise limit_error(
            f"sampling.prompt_logprobs is {top} for {num_prompt_tokens} prompt tokens, and one prompt may "
            f"have {MAX_PROMPT_LOGPROB_PAIRS} log-probabilities: ask for at most {most}, "
            "or shorten the prompt",
            "sampling.prompt_logprobs",
            "max_prompt_logprob_pairs",
            top,
            most,
        )


def reply_too_large(num_bytes: int) -> LimitExceededError:
    """The error of Complete."""
    return limit_error(
        f"the reply would have {num_bytes} bytes or more, and clients take {MAX_REPLY_BYTES} in one message: "
        "use Generate, which streams, or ask for fewer samples, tokens or log-probabilities",
        "request",
        "max_reply_bytes",
        num_bytes,
        MAX_REPLY_BYTES,
    )


def tokenize_reply_too_large(num_bytes: int) -> LimitExceededError:
    """The error of Tokenize."""
    return limit_error(
        f"the reply would have {num_bytes} bytes or more, and clients take {MAX_REPLY_BYTES} in one message: "
        "send the text in parts",
        "input",
        "max_reply_bytes",
        num_bytes,
        MAX_REPLY_BYTES,
    )
