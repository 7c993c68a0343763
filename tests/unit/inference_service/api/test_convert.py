"""Conversion of inference messages: every field of a request, every limit by name."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_service.api import convert
from inference_service.api.convert_prompt import MAX_CHAT_MESSAGES, MAX_ROLE_LENGTH, tokenize_prompt
from inference_service.api.generation_request import ChatPrompt, RequestRules, TextPrompt, TokenPrompt
from inference_service.domain.errors import InvalidRequestError, LimitExceededError
from inference_service.text.sampling_defaults import SamplingDefaults
from lorikeet.inference.v1 import generation_pb2
from lorikeet_contract.status import ServiceError
from tests.support.fake_engine import EOS, make_info

INFO = make_info()
DEFAULTS = SamplingDefaults(0.75, top_p=0.5, top_k=3, max_tokens=77, min_p=0.125, repetition_penalty=1.25)
RULES = RequestRules(INFO, DEFAULTS)


def request(**sampling: Any) -> generation_pb2.GenerateRequest:
    """A valid request with these sampling fields."""
    return generation_pb2.GenerateRequest(prompt="x", sampling=generation_pb2.SamplingParams(**sampling))


_valid_sampling = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0.125, 2, width=32),
        "top_p": st.floats(0.125, 1, width=32),
        "top_k": st.integers(0, INFO.vocab_size - 1),
        "seed": st.integers(0, 2**64 - 1),
        "max_tokens": st.integers(1, INFO.limits.max_context_tokens),
        "ignore_eos": st.booleans(),
        "stop_strings": st.lists(st.text(min_size=1, max_size=256), max_size=4, unique=True),
        "stop_token_ids": st.lists(st.integers(0, 255), max_size=5, unique=True),
        "include_stop_string": st.booleans(),
        "logprobs": st.integers(0, INFO.limits.max_top_logprobs),
        "prompt_logprobs": st.integers(0, INFO.limits.max_top_logprobs),
        "skip_special_tokens": st.booleans(),
        "presence_penalty": st.floats(-2, 2, width=32),
        "frequency_penalty": st.floats(-2, 2, width=32),
        "repetition_penalty": st.floats(0.125, 1000, width=32),
        "min_p": st.floats(0, 1, width=32),
        "logit_bias": st.dictionaries(st.integers(0, 299), st.floats(-100, 100, width=32), max_size=5),
        "min_tokens": st.integers(0, 2**32 - 1),
        "bad_words": st.lists(st.text(min_size=1, max_size=256).filter(str.strip), max_size=4, unique=True),
        "n": st.integers(1, INFO.limits.max_samples),
    },
)


@given(_valid_sampling)
def test_sampling_fields(asked: dict[str, Any]) -> None:
    """What was given arrives as given; what was left out takes the model's or the documented default."""
    parsed = convert.generation_request(request(**asked), RULES).sampling
    params = parsed.params
    for name, default in {
        "temperature": DEFAULTS.temperature,
        "top_p": DEFAULTS.top_p,
        "top_k": DEFAULTS.top_k,
        "include_stop_string": False,
        "skip_special_tokens": True,
        "logprobs": None,
        "prompt_logprobs": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": DEFAULTS.repetition_penalty,
        "min_p": DEFAULTS.min_p,
        "min_tokens": 0,
    }.items():
        assert getattr(params, name) == asked.get(name, default), name
    assert (parsed.max_tokens, parsed.seed) == (asked.get("max_tokens"), asked.get("seed"))
    assert parsed.num_samples == asked.get("n", 1)
    assert params.stop_strings == tuple(asked.get("stop_strings", ()))
    eos = () if asked.get("ignore_eos") else (EOS,)
    assert params.stop_token_ids == (*eos, *asked.get("stop_token_ids", ()))
    held_back = (EOS, *asked.get("stop_token_ids", ())) if asked.get("min_tokens") else ()
    assert params.held_back_token_ids == held_back
    assert params.logit_bias == tuple(sorted(asked.get("logit_bias", {}).items()))
    assert parsed.bad_words == tuple(asked.get("bad_words", ()))
    known = {f.name for f in generation_pb2.SamplingParams.DESCRIPTOR.fields}
    assert known == set(_SAMPLING_FIELDS), "a new field needs its place in this test"


_SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "seed", "max_tokens", "ignore_eos", "stop_strings", "stop_token_ids",
    "include_stop_string", "logprobs", "prompt_logprobs", "skip_special_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "logit_bias", "min_tokens",
    "bad_words", "n", "structured_output",  # the last: test_convert_constraint.py
)  # fmt: skip


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": -0.1}, "sampling.temperature"),
        ({"temperature": 2.1}, "sampling.temperature"),
        ({"temperature": math.nan}, "sampling.temperature"),
        ({"temperature": math.inf}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_p": 1.1}, "sampling.top_p"),
        ({"top_p": -1.0}, "sampling.top_p"),
        ({"top_p": math.nan}, "sampling.top_p"),
        ({"max_tokens": 0}, "sampling.max_tokens"),
        ({"stop_strings": ["a", ""]}, "sampling.stop_strings[1]"),
        ({"presence_penalty": 2.01}, "sampling.presence_penalty"),
        ({"frequency_penalty": -2.01}, "sampling.frequency_penalty"),
        ({"frequency_penalty": math.nan}, "sampling.frequency_penalty"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"repetition_penalty": math.inf}, "sampling.repetition_penalty"),
        ({"min_p": -0.1}, "sampling.min_p"),
        ({"min_p": 1.5}, "sampling.min_p"),
        ({"logit_bias": {1: 0, 7: 100.5}}, "sampling.logit_bias[7]"),
        ({"logit_bias": {7: math.nan}}, "sampling.logit_bias[7]"),
        ({"bad_words": ["a", " "]}, "sampling.bad_words[1]"),
        ({"n": 0}, "sampling.n"),
        ({"min_tokens": 1, "stop_token_ids": range(300)}, "sampling.min_tokens"),
    ],
)
def test_invalid_sampling(sampling: dict[str, Any], field: str) -> None:
    """The field and its value are named."""
    with pytest.raises(InvalidRequestError, match=field.replace("[", r"\[")) as caught:
        convert.generation_request(request(**sampling), RULES)
    assert caught.value.metadata["field"] == field
    assert caught.value.metadata["value"]


@pytest.mark.parametrize(
    ("sampling", "limit", "value", "maximum"),
    [
        ({"max_tokens": 10_001}, "max_context_tokens", 10_001, 10_000),
        ({"logprobs": 21}, "max_top_logprobs", 21, 20),
        ({"prompt_logprobs": 2**32 - 1}, "max_top_logprobs", 2**32 - 1, 20),
        ({"stop_strings": list("abcde")}, "max_stop_strings", 5, 4),
        ({"stop_strings": ["x" * 257]}, "max_stop_string_length", 257, 256),
        ({"stop_token_ids": [0] * 1025}, "max_stop_token_ids", 1025, 1024),
        ({"stop_token_ids": [1, 300]}, "vocab_size", 300, 299),
        ({"logit_bias": {1: 1.0, 300: 1.0}}, "vocab_size", 300, 299),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "max_logit_bias_tokens", 1025, 1024),
        ({"bad_words": ["x"] * 129}, "max_bad_words", 129, 128),
        ({"bad_words": ["x" * 257]}, "max_bad_word_length", 257, 256),
        ({"n": 9}, "max_samples", 9, 8),
        ({"n": 2**32 - 1}, "max_samples", 2**32 - 1, 8),
    ],
)
def test_limits_are_named(sampling: dict[str, Any], limit: str, value: int, maximum: int) -> None:
    """Field, limit, value and maximum, in the metadata and in the words."""
    with pytest.raises(LimitExceededError) as caught:
        convert.generation_request(request(**sampling), RULES)
    metadata = caught.value.metadata
    assert (metadata["limit"], metadata["value"], metadata["maximum"]) == (limit, str(value), str(maximum))
    assert metadata["field"].startswith("sampling.")
    assert str(value) in caught.value.message
    assert str(maximum) in caught.value.message
    assert caught.value.message.partition(f"{maximum}: ")[2], "says what to do"


@pytest.mark.parametrize(
    ("sampling", "advice"),
    [
        ({"n": 9}, "ask for at most 8, or raise the server's --max-samples"),
        ({"logprobs": 21}, "ask for at most 20, or raise the server's --max-top-logprobs"),
        ({"stop_strings": list("abcde")}, "send at most 4, or raise the server's --max-stop-strings"),
        ({"max_tokens": 10_001}, "ask for at most 10000 less the prompt's tokens, or leave it out"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "send at most 1024"),
    ],
)
def test_advice_of_limits(sampling: dict[str, Any], advice: str) -> None:
    """What the caller can do, and the flag where the server's is one."""
    with pytest.raises(LimitExceededError) as caught:
        convert.generation_request(request(**sampling), RULES)
    assert caught.value.message.endswith(f": {advice}")


def test_biases_are_named_by_token() -> None:
    """An unknown token as a value out of range."""
    with pytest.raises(LimitExceededError, match=r"logit_bias\[300\] is for token 300; ") as caught:
        convert.generation_request(request(logit_bias={1: 1.0, 300: 1.0}), RULES)
    assert caught.value.metadata["field"] == "sampling.logit_bias[300]"


def test_whole_vocabulary_where_the_limit_allows() -> None:
    """A limit above the vocabulary means the vocabulary."""
    rules = RequestRules(make_info(max_top_logprobs=10**6), DEFAULTS)
    assert convert.generation_request(request(logprobs=300), rules).sampling.params.logprobs == 300
    with pytest.raises(LimitExceededError, match=r": ask for at most 300$"):  # no flag makes it larger
        convert.generation_request(request(logprobs=301), rules)


def test_edges_of_the_distribution() -> None:
    """Tiny temperatures are greedy rather than an overflow; a top_k of the vocabulary or more keeps all."""
    params = convert.generation_request(request(temperature=1e-30, top_k=300), RULES).sampling.params
    assert (params.temperature, params.top_k) == (0.0, 0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, "input"),
        ({"prompt": ""}, "prompt"),
        ({"token_ids": generation_pb2.TokenIds()}, "token_ids"),
        ({"chat": generation_pb2.ChatMessages()}, "chat.messages"),
        (
            {"chat": generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage(content="x")])},
            "chat.messages[0].role",
        ),
        ({"prompt": "x", "request_id": "a b"}, "request_id"),
        ({"prompt": "x", "request_id": "x" * 129}, "request_id"),
        ({"prompt": "x", "request_id": "é"}, "request_id"),
        ({"prompt": "x", "request_id": "a\n"}, "request_id"),
        ({"prompt": "x", "adapter": ""}, "adapter"),
    ],
)
def test_invalid_requests(changes: dict[str, Any], field: str) -> None:
    """Each field outside sampling that may be wrong."""
    with pytest.raises(InvalidRequestError) as caught:
        convert.generation_request(generation_pb2.GenerateRequest(**changes), RULES)
    assert caught.value.metadata["field"] == field


@pytest.mark.parametrize(("ids", "limit"), [([1, 300], "vocab_size"), ([1] * 10_000, "max_context_tokens")])
def test_token_ids_beyond_the_model(ids: list[int], limit: str) -> None:
    """Ids outside the vocabulary, and more than the context has."""
    message = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=ids))
    with pytest.raises(LimitExceededError) as caught:
        convert.generation_request(message, RULES)
    assert caught.value.metadata["limit"] == limit


def test_prompts_of_each_kind() -> None:
    """Text, chat and ids, with their flags' defaults; padding ids of the vocabulary are valid."""
    chat = generation_pb2.ChatMessages(
        messages=[generation_pb2.ChatMessage(role="user", content="hi")], add_generation_prompt=False
    )
    ids = generation_pb2.TokenIds(ids=[0, 299])
    make = generation_pb2.GenerateRequest
    assert convert.generation_request(make(prompt="a"), RULES).prompt == TextPrompt("a")
    assert convert.generation_request(make(token_ids=ids), RULES).prompt == TokenPrompt((0, 299))
    parsed = convert.generation_request(make(chat=chat), RULES).prompt
    assert isinstance(parsed, ChatPrompt)
    assert (parsed.turns[0].role, parsed.turns[0].content) == ("user", "hi")
    assert not parsed.add_generation_prompt
    tokenize = generation_pb2.TokenizeRequest(prompt="", add_special_tokens=False)
    assert tokenize_prompt(tokenize) == TextPrompt("", add_special_tokens=False)
    with pytest.raises(InvalidRequestError, match="prompt or chat"):
        tokenize_prompt(generation_pb2.TokenizeRequest())


@pytest.mark.parametrize(
    ("count", "role", "limit", "maximum"),
    [
        (MAX_CHAT_MESSAGES + 1, "u", "max_chat_messages", MAX_CHAT_MESSAGES),
        (1, "r" * (MAX_ROLE_LENGTH + 1), "max_role_length", MAX_ROLE_LENGTH),
    ],
)
def test_limits_of_a_chat(count: int, role: str, limit: str, maximum: int) -> None:
    """One more than allowed is refused by name, for generation and Tokenize; the limit itself passes."""
    turn = generation_pb2.ChatMessage
    chat = generation_pb2.ChatMessages(messages=[turn(role=role)] * count)
    for read in (
        lambda: convert.generation_request(generation_pb2.GenerateRequest(chat=chat), RULES),
        lambda: tokenize_prompt(generation_pb2.TokenizeRequest(chat=chat)),
    ):
        with pytest.raises(LimitExceededError) as caught:
            read()
        assert (caught.value.metadata["limit"], caught.value.metadata["maximum"]) == (limit, str(maximum))
        assert caught.value.metadata["value"] == str(maximum + 1)
    most = generation_pb2.ChatMessages(messages=[turn(role="r" * MAX_ROLE_LENGTH)] * MAX_CHAT_MESSAGES)
    assert tokenize_prompt(generation_pb2.TokenizeRequest(chat=most))


@given(st.integers(1, 300), st.integers(1, 300), st.one_of(st.none(), st.integers(1, 400)))
def test_output_fits_into_the_context(prompt: int, context: int, asked: int | None) -> None:
    """Prompt and output together never exceed the context; what cannot is refused, not cut."""
    wanted = convert.generation_request(request(**({} if asked is None else {"max_tokens": asked})), RULES)
    try:
        resolved = wanted.sampling.resolve(prompt, context, drawn_seed=5)
    except LimitExceededError:
        assert prompt >= context or (asked is not None and prompt + asked > context)
        return
    assert resolved.max_tokens == (asked if asked is not None else min(context - prompt, 77))
    assert prompt + resolved.max_tokens <= context
    assert resolved.seed == 5


@pytest.mark.parametrize(("asked", "maximum"), [({"max_tokens": 5}, 5), ({}, 77)])
def test_min_tokens_fit_into_max_tokens(asked: dict[str, int], maximum: int) -> None:
    """One more than the request may have is refused by name, whoever set the maximum."""
    fits = convert.generation_request(request(**asked, min_tokens=maximum), RULES).sampling
    assert fits.resolve(3, 1000, 0).min_tokens == maximum
    wanted = convert.generation_request(request(**asked, min_tokens=maximum + 1), RULES).sampling
    with pytest.raises(LimitExceededError) as caught:
        wanted.resolve(3, 1000, 0)
    assert caught.value.metadata["field"] == "sampling.min_tokens"
    assert caught.value.metadata["maximum"] == str(maximum)


def test_errors_are_ours() -> None:
    """Every refusal is a ServiceError with a stable reason."""
    assert issubclass(InvalidRequestError, ServiceError)
    assert (InvalidRequestError.reason, LimitExceededError.reason) == ("INVALID_REQUEST", "LIMIT_EXCEEDED")
