"""Chat templates against golden renderings, and Hugging Face's extras."""

import json
from pathlib import Path
from typing import Any

import pytest

from inference_service.domain.errors import InvalidRequestError, LimitExceededError
from inference_service.text.chat_template import ChatTemplate, ChatTemplateError, ChatTurn
from inference_service.text.tokenizer import Tokenizer

_FIXTURES = Path(__file__).parents[3] / "fixtures"
_CHATS: list[dict[str, Any]] = json.loads((_FIXTURES / "golden" / "tokenizer.json").read_text())["chats"]
_HELLO = [ChatTurn("user", "hi")]


def _template(source: str | None, **tokens: str) -> ChatTemplate:
    return ChatTemplate(source, tokens)


@pytest.mark.parametrize("chat", _CHATS, ids=lambda c: f"{len(c['messages'])}-{c['add_generation_prompt']}")
@pytest.mark.parametrize("form", ["as stored", "inside tokenizer_config.json", "chat_template.jinja"])
def test_golden_chats(tmp_path: Path, chat: dict[str, Any], form: str) -> None:
    """The same text and ids, wherever the model directory keeps its template."""
    model_dir = _FIXTURES / "models" / "qwen3_moe"
    if form != "as stored":
        model_dir = _move_template(model_dir, tmp_path, in_config=form == "inside tokenizer_config.json")
    template = ChatTemplate.from_directory(model_dir)
    turns = [ChatTurn(m["role"], m["content"]) for m in chat["messages"]]
    generate = chat["add_generation_prompt"]
    rendered = template.render(turns, add_generation_prompt=generate, max_characters=100_000)
    assert rendered == chat["rendered"]
    tokenizer = Tokenizer.from_directory(_FIXTURES / "models" / "qwen3_moe")
    assert tokenizer.encode(rendered, add_special_tokens=False) == chat["ids"]


def _move_template(model_dir: Path, target: Path, *, in_config: bool) -> Path:
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    path = model_dir / "chat_template.jinja"
    source = path.read_text() if path.is_file() else config["chat_template"]
    if in_config:
        config["chat_template"] = [
            {"name": "tool_use", "template": "wrong"},
            {"name": "default", "template": source},
        ]
    else:
        config["chat_template"] = "wrong"
        (target / "chat_template.jinja").write_text(source)
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hi"),
        ("{% if True %}\n  x\n{% endif %}\n", "  x\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'b': 'é<', 'a': 1} | tojson }}", '{"b": "é<", "a": 1}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% generation %}{{ messages[0]['role'] }}{% endgeneration %}", "user"),
        ("{{ tools is none and documents is none }}", "True"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 1 %}{% endfor %}{{ ns.n }}",
            "1",
        ),
    ],
)
def test_hugging_face_semantics(source: str, rendered: str) -> None:
    """Blocks trimmed, loop controls, tojson without HTML escapes, special tokens, generation blocks."""
    assert (
        _template(source, bos_token="<s>").render(_HELLO, add_generation_prompt=True, max_characters=1000)
        == rendered
    )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "refuses these messages"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ 1 / 0 }}", "refuses these messages"),
        ("{{ missing.attribute }}", "missing"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses these messages"),
        ("{{ 'x' | attr('__class__') }}{{ raise_exception('safe') }}", "refuses these messages"),
        ("{% for i in range(10**9) %}{% endfor %}", "refuses these messages"),
    ],
)
def test_what_a_template_raises_is_the_callers_error(source: str, words: str) -> None:
    """Template errors, escapes from the sandbox and huge ranges are INVALID_ARGUMENT on field chat."""
    with pytest.raises(InvalidRequestError, match=words) as caught:
        _template(source).render(_HELLO, add_generation_prompt=True, max_characters=1000)
    assert caught.value.metadata["field"] == "chat"


def test_messages_without_a_text_are_named() -> None:
    """Where an expression fails, not where the template has words of its own, or all have texts."""
    turns = [
        *_HELLO,
        *[ChatTurn("assistant", "", {"content": None})] * 5,
        ChatTurn("user", "", {"content": [{"type": "text", "text": "x"}]}),
    ]
    joined = _template("{% for m in messages %}{{ m.content + '' }}{% endfor %}")
    with pytest.raises(InvalidRequestError) as caught:
        joined.render(turns, add_generation_prompt=True, max_characters=1000)
    assert caught.value.message.endswith(
        " (content is null in chat.messages[1], chat.messages[2], chat.messages[3] and 2 more; "
        "content is not a text in chat.messages[6])"
    )
    own, plain = _template("{{ raise_exception('own words') }}"), _template("{{ messages[5].content }}")
    for template, messages in ((own, turns), (plain, _HELLO)):
        with pytest.raises(InvalidRequestError) as caught:
            template.render(messages, add_generation_prompt=True, max_characters=1000)
        assert "content is" not in caught.value.message


def test_output_is_bounded() -> None:
    """A template that repeats itself ends at the limit, not at the memory's."""
    source = "{% for i in range(9999) %}{% for j in range(9999) %}xxxxxxxxxx{% endfor %}{% endfor %}"
    with pytest.raises(LimitExceededError, match="no text above 1000 can fit"):
        _template(source).render(_HELLO, add_generation_prompt=True, max_characters=1000)


def test_no_template() -> None:
    """A model without a template says so."""
    with pytest.raises(InvalidRequestError, match="no chat template"):
        _template(None).render(_HELLO, add_generation_prompt=True, max_characters=1000)


def test_a_template_that_does_not_parse_stops_the_start() -> None:
    """The error names the line."""
    with pytest.raises(ChatTemplateError, match="line 2"):
        _template("\n{% if %}")


def test_special_tokens_from_the_config(tmp_path: Path) -> None:
    """Tokens are plain strings or objects; absent and null ones stay undefined."""
    config = {"bos_token": {"content": "<b>", "lstrip": False}, "eos_token": "<e>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}")
    template = ChatTemplate.from_directory(tmp_path)
    assert template.render(_HELLO, add_generation_prompt=False, max_characters=99) == "<b><e>False"
