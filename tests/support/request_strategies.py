"""Random requests: valid ones, ones with extreme or senseless fields, and wire bytes made from them."""

import base64
import json
import math
import zlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hypothesis import strategies as st

from lorikeet.inference.v1 import generation_pb2 as pb

# Texts with every kind of character that protobuf can carry; surrogates it cannot.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=24)
_UINT32 = st.integers(0, 2**32 - 1)
_SMALL = st.integers(0, 12)
_COUNTS = st.one_of(
    _SMALL, _SMALL, st.sampled_from([0, 1, 2, 95, 96, 97, 2**31 - 1, 2**31, 2**32 - 1]), _UINT32
)
_FLOATS = st.one_of(
    st.floats(0, 2, width=32),
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1.0, 1e-30, -1.0, 2.0, 2.5, math.inf, -math.inf, math.nan, 3.4e38]),
)
_TOKENS = st.one_of(st.integers(0, 527), st.integers(0, 527), _UINT32)
_WORDS = st.one_of(st.sampled_from(["a", "e", "the", " ", "", "\n", "é", "<|im_end|>", "x" * 300]), TEXTS)
_TAME_WORDS = st.sampled_from(["a", "e", "the", "é", "<|im_end|>", "story", ".", "x" * 256])


def rarely(strategy: st.SearchStrategy[Any], of: int = 4) -> st.SearchStrategy[Any]:
    """A value in one draw of so many, else None; `one_of` would draw it every other time."""
    return st.sampled_from(range(of)).flatmap(lambda place: strategy if place == of - 1 else st.none())


# Two requests of three stay within all ranges.
_TAME: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2, width=32),
    "top_p": st.floats(0.125, 1, width=32),
    "top_k": st.integers(0, 600),
    "max_tokens": st.integers(1, 8),
    "logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20),
    "presence_penalty": st.floats(-2, 2, width=32),
    "frequency_penalty": st.floats(-2, 2, width=32),
    "repetition_penalty": st.floats(0.125, 1000, width=32),
    "min_p": st.floats(0, 1, width=32),
    "min_tokens": st.integers(0, 3),
    "n": st.integers(1, 8),
}
_WILD = {
    name: _FLOATS if name.endswith(("_penalty", "_p", "temperature")) else _COUNTS
    for name in _TAME
}  # fmt: skip
_FREE: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**64 - 1),
    "skip_special_tokens": st.booleans(),
    "ignore_eos": st.booleans(),
    "include_stop_string": st.booleans(),
}


@st.composite
def sampling_params(draw: st.DrawFn) -> pb.SamplingParams:
    """Some of the fields; in one of three requests any of them may be out of its range."""
    is_wild = draw(st.sampled_from(range(3))) == 2
    strategies = (_WILD if is_wild else _TAME) | _FREE
    names = draw(st.lists(st.sampled_from(sorted(strategies)), unique=True, max_size=6))
    values = {name: draw(strategies[name]) for name in names}
    message = pb.SamplingParams(**{"max_tokens": draw(_TAME["max_tokens"]), **values})
    words = _WORDS if is_wild else _TAME_WORDS
    tokens = _TOKENS if is_wild else st.integers(0, 527)
    message.stop_strings.extend(draw(rarely(st.lists(words, max_size=5 if is_wild else 4), 3)) or ())
    message.bad_words.extend(draw(rarely(st.lists(words, max_size=4), 6)) or ())
    message.stop_token_ids.extend(draw(rarely(st.lists(tokens, max_size=5))) or ())
    biases = st.dictionaries(tokens, _FLOATS if is_wild else st.floats(-100, 100, width=32), max_size=4)
    for token_id, bias in (draw(rarely(biases, 6)) or {}).items():
        message.logit_bias[token_id] = bias
    if (output := draw(rarely(structured_outputs(), 6))) is not None:
        message.structured_output.CopyFrom(output)
    return message


_SCHEMAS = st.sampled_from(
    ['{"type": "boolean"}', '{"enum": ["a", 1, null]}', '{"type": "array", "items": {"type": "null"}}', "{}",
     '{"type": "nonsense"}', '{"$ref": "#"}', '{"$ref": "http://x"}', "{", "true", "false", '{"not": {}}',
     '{"minLength": 99999999999}', '{"pattern": "(a|b)*c{9999}"}', '{"anyOf": []}']
)  # fmt: skip
_REGEXES = st.sampled_from(["[a-c]{1,8}", "(yes|no)", "a*", "(", "(?=x)y", "", "x{100000}", "\\d+", "[^a]"])
_GRAMMARS = st.sampled_from(['start: "a" | "b" "c"', "start: start", "start: /(/", "x: y", "", 'start: "a"+'])


@st.composite
def structured_outputs(draw: st.DrawFn) -> pb.StructuredOutput:
    """Of every kind, sound and senseless."""
    match draw(st.sampled_from(range(6))):
        case 0:
            output = pb.StructuredOutput(json_schema=draw(st.one_of(_SCHEMAS, json_objects(), TEXTS)))
        case 1:
            output = pb.StructuredOutput(json_object=draw(st.booleans()))
        case 2:
            output = pb.StructuredOutput(regex=draw(st.one_of(_REGEXES, TEXTS)))
        case 3:
            output = pb.StructuredOutput(grammar=draw(st.one_of(_GRAMMARS, TEXTS)))
        case 4:
            texts = draw(st.lists(st.one_of(_TAME_WORDS, TEXTS), max_size=4))
            output = pb.StructuredOutput(choice=pb.Choices(values=texts))
        case _:
            output = pb.StructuredOutput()
    output.disable_any_whitespace = draw(st.booleans())
    return output


_NAMES = st.sampled_from(
    ["tools", "tool_calls", "enable_thinking", "name", "function", "arguments", "__class__", "self", "loop",
     "range", "namespace", "raise_exception", "strftime_now", "messages", "role", "content", "bos_token",
     "true", "x", "", "parameters", "thinking"]
)  # fmt: skip
_LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), TEXTS,
    st.sampled_from(["{{ 1 / 0 }}", "{% for x in y %}", "<|im_end|>", "\x00", "x" * 500]),
)  # fmt: skip
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=10,
)  # fmt: skip
_TOOL_CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": TEXTS, "arguments": _VALUES})}
    ),
    max_size=3,
)  # fmt: skip


@st.composite
def json_objects(draw: st.DrawFn) -> str:
    """Mostly an object; also broken, deep, or no object at all."""
    kind = draw(st.integers(0, 11))
    if kind < 4:
        return ""
    if kind == 4:
        depth = draw(st.sampled_from([10, 100, 500, 1_000, 100_000]))
        opening, closing = draw(st.sampled_from([("[", "]"), ('{"x":', "}")]))
        deep = opening * depth + "1" + closing * depth
        count = draw(st.sampled_from([1, 1, 40]))
        return '{"tools": [{"x": [' + ", ".join([deep] * count) + "]}]}"
    if kind == 5:
        return draw(
            st.sampled_from(["{", "[]", "null", "{} {}", '{"x": NaN}', '{"x": 1e999}', "\ufeff{}", '"x"'])
        )
    values = draw(st.dictionaries(_NAMES, _VALUES, max_size=4))
    if kind > 7:
        values["tool_calls"] = draw(_TOOL_CALLS)
    return json.dumps(values, ensure_ascii=draw(st.booleans()))


@st.composite
def chats(draw: st.DrawFn) -> pb.ChatMessages:
    """Conversations with roles, fields and arguments of any kind."""
    roles = st.sampled_from(["user", "assistant", "system", "tool", "developer", "", "r" * 65, "rôle"])
    chat = pb.ChatMessages()
    is_wild = draw(st.sampled_from(range(2))) == 1
    tame_roles = st.sampled_from(["user", "assistant", "tool"])
    for _ in range(draw(st.integers(0 if is_wild else 1, 4))):
        role = draw(roles if is_wild else tame_roles)
        chat.messages.add(role=role, content=draw(TEXTS), fields_json=draw(json_objects()) if is_wild else "")
    if (add := draw(rarely(st.booleans()))) is not None:
        chat.add_generation_prompt = add
    if is_wild or draw(st.booleans()):
        chat.template_arguments_json = draw(json_objects())
    return chat


@st.composite
def generate_requests(draw: st.DrawFn) -> pb.GenerateRequest:
    """A request of any input."""
    message = pb.GenerateRequest()
    kind = draw(st.sampled_from(["prompt"] * 4 + ["token_ids"] * 4 + ["chat"] * 4 + ["none"]))
    if kind == "prompt":
        texts = st.sampled_from(["a story", "The fox said: ", "x", "Ωμέγα 東京 🦜", "a story " * 40])
        message.prompt = draw(st.one_of(texts, texts, TEXTS))
    elif kind == "token_ids":
        message.token_ids.SetInParent()
        ids = draw(st.sampled_from([st.integers(0, 527)] * 4 + [_TOKENS]))
        message.token_ids.ids.extend(draw(st.lists(ids, min_size=draw(st.sampled_from([1, 0])), max_size=20)))
    elif kind == "chat":
        message.chat.CopyFrom(draw(chats()))
    if draw(st.sampled_from(range(6))):
        message.sampling.CopyFrom(draw(sampling_params()))
    if (adapter := draw(rarely(st.one_of(st.just(""), st.just("a@b"), TEXTS), 12))) is not None:
        message.adapter = adapter
    message.request_id = draw(rarely(st.one_of(st.sampled_from(["r1", "r2", "a b"]), TEXTS), 12)) or ""
    return message


@st.composite
def tokenize_requests(draw: st.DrawFn) -> pb.TokenizeRequest:
    """A text or a chat."""
    message = pb.TokenizeRequest()
    if draw(st.booleans()):
        message.prompt = draw(TEXTS)
    elif draw(st.booleans()):
        message.chat.CopyFrom(draw(chats()))
    if (add := draw(rarely(st.booleans()))) is not None:
        message.add_special_tokens = add
    return message


_JUNK = st.one_of(
    st.binary(max_size=12),
    # Tags with lengths that reach nowhere, groups without an end, long varints, text that is no UTF-8.
    st.sampled_from([b"\x0a\xff\xff\xff\xff\x7f", b"\x0b", b"\x08" + b"\xff" * 11, b"\x1a\x02\xff\xfe"]),
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, raw: bytes) -> bytes:
    """A few cuts, repeats, insertions and flipped bytes."""
    for _ in range(draw(st.integers(1, 4))):
        begin, end = sorted((draw(st.integers(0, len(raw))), draw(st.integers(0, len(raw)))))
        match draw(st.sampled_from(range(6))):
            case 0:
                raw = raw[:begin] + raw[end:]
            case 1:
                raw = raw[:end] + raw[begin:end] + raw[end:]
            case 2:
                raw = raw[:begin] + draw(_JUNK) + raw[begin:]
            case 3 if raw:
                place = min(begin, len(raw) - 1)
                raw = raw[:place] + bytes([draw(st.integers(0, 255))]) + raw[place + 1 :]
            case 4:
                raw += raw
            case _:
                raw = raw[:begin]
    return raw


class Ending(StrEnum):
    """What the client does with its call."""

    READ = "read"
    CANCEL = "cancel"
    ABORT = "abort"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class RandomCall:
    """One call: a method and the bytes that it is sent; after `num_read` replies it ends as `ending` says.

    Shown with its bytes packed: `zlib.decompress(base64.b64decode(...))` are they.
    """

    method: str
    raw: bytes
    ending: Ending = Ending.READ
    num_read: int = 0
    timeout_s: float | None = None

    def __repr__(self) -> str:
        packed = base64.b64encode(zlib.compress(self.raw, 9)).decode()
        return f"{self.method} {self.ending} {self.num_read} {self.timeout_s} {packed}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis would show the fields


@st.composite
def calls(draw: st.DrawFn) -> RandomCall:
    """A message as it is, or its bytes mutated, or bytes of nothing; most calls are read to their end."""
    method = draw(st.sampled_from(["Generate", "Generate", "Complete", "Tokenize"]))
    if method == "Tokenize":
        message: Any = draw(tokenize_requests())
    else:
        message = draw(generate_requests())
        if method == "Complete":
            message = pb.CompleteRequest(request=message)
    raw: bytes = message.SerializeToString()
    match draw(st.sampled_from(range(10))):
        case 9:
            return RandomCall(method, draw(st.binary(max_size=64)))
        case 7 | 8:
            return RandomCall(method, draw(mutated(raw)))
        case 6:
            ending = draw(st.sampled_from([Ending.CANCEL, Ending.DEADLINE]))
            timeout_s = draw(st.floats(0.0, 0.05)) if ending is Ending.DEADLINE else None
            return RandomCall(method, raw, ending, draw(st.integers(0, 3)), timeout_s)
        case 5 if method == "Generate":
            return RandomCall(method, raw, Ending.ABORT, draw(st.integers(0, 3)))
        case _:
            return RandomCall(method, raw)
