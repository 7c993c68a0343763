"""Sampling parameters of a message to checked values. Pure."""

import math
from collections.abc import Mapping, Sequence

from inference_service.api.convert_constraint import read_constraint
from inference_service.api.field_errors import check_ids_known, limit_error, refuse
from inference_service.api.generation_request import RequestRules, SamplingRequest
from inference_service.domain.sampling import SamplingParams
from inference_service.text.sampling_defaults import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY
from lorikeet.inference.v1 import generation_pb2

_MAX_PENALTY = 2.0
_MAX_TEMPERATURE = 2.0
# Below this, dividing logits overflows float32, and the distribution is one token anyway.
_GREEDY_BELOW = 1e-4
# Bounds the matcher's work for each token.
_MAX_STOP_STRING_LENGTH = 256
_MAX_STOP_TOKEN_IDS = 1024
# Bound what each step copies to the device for one request.
_MAX_LOGIT_BIAS_TOKENS = 1024
_MAX_LOGIT_BIAS = 100.0
_MAX_BAD_WORDS = 128
_MAX_BAD_WORD_LENGTH = 256


def read_sampling(message: generation_pb2.SamplingParams, rules: RequestRules) -> SamplingRequest:
    """Check and read how tokens are chosen; what is left out takes the model's or the documented default.

    Raises:
        InvalidRequestError: a field has a value it may not have.
        LimitExceededError: a field is above a limit, which is named.
    """
    limits, defaults = rules.info.limits, rules.defaults
    context = limits.max_context_tokens
    max_tokens = _at_most(
        "max_tokens",
        "max_context_tokens",
        _optional(message, "max_tokens"),
        context,
        f"ask for at most {context} less the prompt's tokens, or leave it out",
    )
    if max_tokens == 0:
        refuse("sampling.max_tokens", "0", "ask for at least 1 token, or leave the field out")
    stop_ids = _stop_token_ids(message.stop_token_ids, rules.info.vocab_size)
    constraint = read_constraint(message)
    # A complete answer has nothing but its end to choose, and so ends; see StructuredOutput.ends_late.
    ignores_eos = message.ignore_eos and constraint is None
    eos_ids = () if ignores_eos else rules.info.eos_token_ids
    top_k = message.top_k if message.HasField("top_k") else defaults.top_k
    skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
    top = min(limits.max_top_logprobs, rules.info.vocab_size)
    fewer_logprobs = f"ask for at most {top}"
    if top < rules.info.vocab_size:
        fewer_logprobs += ", or raise the server's --max-top-logprobs"
    return SamplingRequest(
        params=SamplingParams(
            max_tokens=defaults.max_tokens or context,
            temperature=_temperature(message, defaults.temperature),
            top_p=_top_p(message, defaults.top_p),
            top_k=top_k if top_k < rules.info.vocab_size else 0,
            stop_token_ids=tuple(dict.fromkeys((*eos_ids, *stop_ids))),
            stop_strings=_stop_strings(message.stop_strings, limits.max_stop_strings),
            include_stop_string=message.include_stop_string,
            skip_special_tokens=skip,
            logprobs=_at_most(
                "logprobs", "max_top_logprobs", _optional(message, "logprobs"), top, fewer_logprobs
            ),
            prompt_logprobs=_at_most(
                "prompt_logprobs",
                "max_top_logprobs",
                _optional(message, "prompt_logprobs"),
                top,
                fewer_logprobs,
            ),
            presence_penalty=_number(message, "presence_penalty", 0.0, -_MAX_PENALTY, _MAX_PENALTY),
            frequency_penalty=_number(message, "frequency_penalty", 0.0, -_MAX_PENALTY, _MAX_PENALTY),
            repetition_penalty=_number(
                message,
                "repetition_penalty",
                defaults.repetition_penalty,
                MIN_REPETITION_PENALTY,
                MAX_REPETITION_PENALTY,
            ),
            min_p=_number(message, "min_p", defaults.min_p, 0.0, 1.0),
            logit_bias=_logit_bias(message.logit_bias, rules.info.vocab_size),
            min_tokens=message.min_tokens,
            held_back_token_ids=_held_back(message, rules, stop_ids),
        ),
        max_tokens=max_tokens,
        seed=_optional(message, "seed"),
        num_samples=_num_samples(message, limits.max_samples),
        bad_words=_bad_words(message.bad_words),
        constraint=constraint,
        ends_late=message.ignore_eos,
    )


def _num_samples(message: generation_pb2.SamplingParams, maximum: int) -> int:
    advice = f"ask for at most {maximum}, or raise the server's --max-samples"
    count = _at_most("n", "max_samples", _optional(message, "n"), maximum, advice)
    if count == 0:
        refuse("sampling.n", "0", "ask for at least 1 sample, or leave the field out")
    return count or 1


def _temperature(message: generation_pb2.SamplingParams, default: float) -> float:
    if not message.HasField("temperature"):
        return default
    value = message.temperature
    if math.isnan(value) or not 0 <= value <= _MAX_TEMPERATURE:
        refuse("sampling.temperature", f"{value:g}", f"use 0 (greedy) to {_MAX_TEMPERATURE:g}")
    return value if value >= _GREEDY_BELOW else 0.0


def _top_p(message: generation_pb2.SamplingParams, default: float) -> float:
    if not message.HasField("top_p"):
        return default
    if math.isnan(message.top_p) or not 0 < message.top_p <= 1:
        refuse("sampling.top_p", f"{message.top_p:g}", "use a value above 0, at most 1")
    return message.top_p


def _number(
    message: generation_pb2.SamplingParams, field: str, default: float, low: float, high: float
) -> float:
    if not message.HasField(field):  # pyright: ignore[reportArgumentType]
        return default
    value: float = getattr(message, field)
    if math.isnan(value) or not low <= value <= high:
        refuse(f"sampling.{field}", f"{value:g}", f"use {low:g} to {high:g}")
    return value


def _logit_bias(biases: Mapping[int, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not biases:
        return ()
    _count_at_most("logit_bias", "max_logit_bias_tokens", len(biases), _MAX_LOGIT_BIAS_TOKENS)
    check_ids_known("sampling.logit_bias", list(biases), vocab_size, are_keys=True)
    for token_id, bias in biases.items():
        if math.isnan(bias) or abs(bias) > _MAX_LOGIT_BIAS:
            refuse(
                f"sampling.logit_bias[{token_id}]",
                f"{bias:g}",
                f"use {-_MAX_LOGIT_BIAS:g} to {_MAX_LOGIT_BIAS:g}",
            )
    return tuple(sorted(biases.items()))


def _held_back(
    message: generation_pb2.SamplingParams, rules: RequestRules, stop_ids: Sequence[int]
) -> tuple[int, ...]:
    """What min_tokens masks: end-of-sequence tokens even where the request ignores them, as in vLLM."""
    if not message.min_tokens:
        return ()
    held_back = tuple(dict.fromkeys((*rules.info.eos_token_ids, *stop_ids)))
    if len(held_back) >= rules.info.vocab_size:
        refuse("sampling.min_tokens", str(message.min_tokens), "the stop tokens leave no token to choose")
    return held_back


def _bad_words(words: Sequence[str]) -> tuple[str, ...]:
    _count_at_most("bad_words", "max_bad_words", len(words), _MAX_BAD_WORDS)
    for index, word in enumerate(words):
        field = f"bad_words[{index}]"
        if not word.strip():
            refuse(f"sampling.{field}", "blank", "name a text, or leave it out")
        _at_most(field, "max_bad_word_length", len(word), _MAX_BAD_WORD_LENGTH, "shorten it")
    return tuple(dict.fromkeys(words))


def _stop_strings(strings: Sequence[str], maximum: int) -> tuple[str, ...]:
    _at_most(
        "stop_strings",
        "max_stop_strings",
        len(strings),
        maximum,
        f"send at most {maximum}, or raise the server's --max-stop-strings",
    )
    for index, text in enumerate(strings):
        field = f"stop_strings[{index}]"
        if not text:
            refuse(f"sampling.{field}", "empty", "an empty string would stop everything; leave it out")
        _at_most(field, "max_stop_string_length", len(text), _MAX_STOP_STRING_LENGTH, "shorten it")
    return tuple(dict.fromkeys(strings))


def _stop_token_ids(ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    _count_at_most("stop_token_ids", "max_stop_token_ids", len(ids), _MAX_STOP_TOKEN_IDS)
    if ids:
        check_ids_known("sampling.stop_token_ids", list(ids), vocab_size)
    return tuple(ids)


def _optional(message: generation_pb2.SamplingParams, field: str) -> int | None:
    return getattr(message, field) if message.HasField(field) else None  # pyright: ignore[reportArgumentType]


def _count_at_most(field: str, limit: str, count: int, maximum: int) -> None:
    _at_most(field, limit, count, maximum, f"send at most {maximum}")


def _at_most(field: str, limit: str, value: int | None, maximum: int, advice: str) -> int | None:
    if value is not None and value > maximum:
        raise limit_error(
            f"sampling.{field} is {value}; this server's {limit} is {maximum}: {advice}",
            f"sampling.{field}",
            limit,
            value,
            maximum,
        )
    return value
