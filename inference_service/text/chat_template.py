"""Chat messages to one prompt text by the model's own template, with Hugging Face's semantics.

Templates come with a model and are code: they run in Jinja's immutable sandbox, and their output is bounded.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inference_service.domain.errors import InvalidRequestError, LimitExceededError

# Beside chat_template.jinja, the default: templates for other uses; "tool_use" is for chats with tools.
_NAMED_TEMPLATES = Path("additional_chat_templates")
# What the words before an answer are called; a template finds them under any of these names.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_RAISED_BY_TEMPLATES = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
# A template's own words may quote a message, of megabytes.
_MAX_ERROR_CHARACTERS = 2_000
_MAX_NAMED_MESSAGES = 3


# What `render` passes by itself; arguments of a request may not replace it.
RESERVED_ARGUMENTS = frozenset({"messages", "add_generation_prompt"})
RESERVED_FIELDS = frozenset(
    {"role", "content"}
)  # the latter only where the message's own content is not empty


# How long the text may be that is being rendered, for filters that could make a lot of a little.
_max_rendered: ContextVar[int] = ContextVar("max_rendered", default=1 << 20)


def _no_fields() -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a chat. `fields`: what else the template may read of it.

    A "content" among them, which may be a list of parts or None, replaces an empty `content`.
    """

    role: str
    content: str
    fields: Mapping[str, Any] = field(default_factory=_no_fields)


def _machine_time() -> datetime:
    return datetime.now()  # noqa: DTZ005 (the machine's local date, as Hugging Face's)


class ChatTemplateError(ValueError):
    """The model directory's template does not parse."""


class ChatTemplate:
    """A parsed template. `source` None: the model has none, and `render` says so.

    Args:
        source: Jinja source.
        special_tokens: bos_token and the like, as the template may use them.
        now: the clock that `strftime_now` reads.
        tool_source: what renders chats with tools; None leaves them to `source`, too.
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = _machine_time,
        tool_source: str | None = None,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = None if source is None else _environment(now).from_string(source)
            self._tool_template = None if tool_source is None else _environment(now).from_string(tool_source)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from error

    @classmethod
    def from_directory(cls, model_dir: Path) -> "ChatTemplate":
        """Read chat_template.jinja and what stands beside it, or the templates of tokenizer_config.json."""
        config_path = model_dir / "tokenizer_config.json"
        config: dict[str, Any] = (
            json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
        )
        sources = _template_files(model_dir) or _configured_templates(config.get("chat_template"))
        return cls(sources.get("default"), _special_tokens(config), tool_source=sources.get("tool_use"))

    def render(
        self,
        turns: Sequence[ChatTurn],
        *,
        add_generation_prompt: bool,
        max_characters: int,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. `arguments` are further variables of the template, none of RESERVED_ARGUMENTS.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages; its words are given.
            LimitExceededError: the text would be longer than `max_characters`.
        """
        has_tools = (arguments or {}).get("tools") is not None
        template = (self._tool_template if has_tools else None) or self._template
        if template is None:
            raise InvalidRequestError(
                "chat: this model has no chat template; send a prompt or token_ids",
                metadata={"field": "chat"},
            )
        variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(arguments or {}),
            "messages": [_message(turn) for turn in turns],
            "add_generation_prompt": add_generation_prompt,
        }
        limit = _max_rendered.set(max_characters)
        try:
            return _joined(template.generate(variables), max_characters)
        # A template is code: its own raise_exception, and whatever Python raises in an expression of it. One
        # that calls itself for what lies deeper ends in RecursionError on what is nested a thousand deep.
        except _RAISED_BY_TEMPLATES as error:
            words = str(error)[:_MAX_ERROR_CHARACTERS] + _contents_without_text(error, turns)
            raise InvalidRequestError(
                f"chat: the model's chat template refuses these messages: {words}", metadata={"field": "chat"}
            ) from error
        finally:
            _max_rendered.reset(limit)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    def strftime_now(format: str) -> str:  # noqa: A002 (templates may pass it by this name)
        return now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update({"raise_exception": _raise_exception, "strftime_now": strftime_now})  # pyright: ignore[reportCallIssue,reportArgumentType]
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}`: marks the assistant's words for training; here it only holds its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the body as it stands."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own: no HTML escapes, non-ASCII text as it is.

    Indented, a megabyte of nested brackets is gigabytes of spaces: it ends where the whole text would.
    """
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return (
        encoder.encode(value) if indent is None else _joined(encoder.iterencode(value), _max_rendered.get())
    )


def _joined(pieces: Iterable[str], max_characters: int) -> str:
    """The whole text; raises LimitExceededError once it is too long."""
    kept: list[str] = []
    length = 0
    for piece in pieces:
        kept.append(piece)
        length += len(piece)
        if length > max_characters:
            raise LimitExceededError(
                f"chat: the rendered chat has {length} bytes or more; no text above {max_characters} can fit "
                "the context: send fewer or shorter messages",
                metadata={
                    "field": "chat",
                    "limit": "max_prompt_bytes",
                    "value": str(length),
                    "maximum": str(max_characters),
                },
            )
    return "".join(kept)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _contents_without_text(error: Exception, turns: Sequence[ChatTurn]) -> str:
    """Which messages have null or a list for content: mostly why an expression of a template fails.

    Empty where there are none, or where the template raised words of its own.
    """
    if type(error) is TemplateError:
        return ""
    found: dict[str, list[str]] = {}
    for index, turn in enumerate(turns):
        content = turn.fields.get("content", turn.content)
        if not isinstance(content, str):
            kind = "is null" if content is None else "is not a text"
            found.setdefault(kind, []).append(f"chat.messages[{index}]")
    hints = [
        f"content {kind} in {', '.join(names[:_MAX_NAMED_MESSAGES])}"
        + (f" and {more} more" if (more := len(names) - _MAX_NAMED_MESSAGES) > 0 else "")
        for kind, names in found.items()
    ]
    return f" ({'; '.join(hints)})" if hints else ""


def _message(turn: ChatTurn) -> dict[str, Any]:
    """A turn as transformers 5.24 hands it on: without what is None, its reasoning by every name."""
    fields: dict[str, Any] = {"role": turn.role, "content": turn.content, **turn.fields}
    message = {name: value for name, value in fields.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING_FIELDS if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _template_files(model_dir: Path) -> dict[str, str]:
    """Sources by name, "default" being the one for chats."""
    paths = {path.stem: path for path in sorted((model_dir / _NAMED_TEMPLATES).glob("*.jinja"))}
    if (default := model_dir / "chat_template.jinja").is_file():
        paths["default"] = default
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items()}


def _configured_templates(value: Any) -> dict[str, str]:
    """Sources by name: one string is the default, a list has named ones."""
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}
    return {} if value is None else {"default": value}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, image_token and the like: each is its text, or an object with its text under "content"."""
    extra = config.get("extra_special_tokens")
    found = {**config, **extra} if isinstance(extra, dict) else config
    tokens = {name: value for name, value in found.items() if name.endswith("_token")}
    texts = {name: v.get("content") if isinstance(v, dict) else v for name, v in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
