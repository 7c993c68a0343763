"""Chat messages to one prompt text by the model's own template, with Hugging Face's semantics.

Templates come with a model and are code: they run in Jinja's immutable sandbox, and their output is bounded.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inference_service.domain.errors import InvalidRequestError, LimitExceededError

# The names under which templates know the special tokens (tokenizer_config.json has the same keys).
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
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


# What `render` passes by itself; arguments of a request may not replace it.
RESERVED_ARGUMENTS = frozenset({"messages", "add_generation_prompt"})
RESERVED_FIELDS = frozenset({"role", "content"})


def _no_fields() -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a chat. `fields`: what else the template may read of it, none of RESERVED_FIELDS."""

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
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = _machine_time,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = None if source is None else _environment(now).from_string(source)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from error

    @classmethod
    def from_directory(cls, model_dir: Path) -> "ChatTemplate":
        """Read chat_template.jinja, or the template inside tokenizer_config.json."""
        config_path = model_dir / "tokenizer_config.json"
        config: dict[str, Any] = (
            json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
        )
        template_path = model_dir / "chat_template.jinja"
        source = (
            template_path.read_text(encoding="utf-8")
            if template_path.is_file()
            else _configured_template(config.get("chat_template"))
        )
        tokens = {key: _token_text(config.get(key)) for key in _SPECIAL_TOKENS}
        return cls(source, {k: v for k, v in tokens.items() if v is not None})

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
        if self._template is None:
            raise InvalidRequestError(
                "chat: this model has no chat template; send a prompt or token_ids",
                metadata={"field": "chat"},
            )
        variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(arguments or {}),
            "messages": [{"role": turn.role, "content": turn.content, **turn.fields} for turn in turns],
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > max_characters:
                    raise LimitExceededError(
                        f"chat: the rendered chat has more than {max_characters} characters, which "
                        "cannot fit the context",
                        metadata={
                            "field": "chat",
                            "limit": "max_context_tokens",
                            "value": str(length),
                            "maximum": str(max_characters),
                        },
                    )
        # A template is code: its own raise_exception, and whatever Python raises in an expression of it. One
        # that calls itself for what lies deeper ends in RecursionError on what is nested a thousand deep.
        except _RAISED_BY_TEMPLATES as error:
            words = str(error)[:_MAX_ERROR_CHARACTERS]
            raise InvalidRequestError(
                f"chat: the model's chat template refuses these messages: {words}", metadata={"field": "chat"}
            ) from error
        return "".join(pieces)


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
    """Unlike Jinja's own: no HTML escapes, non-ASCII text as it is."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _configured_template(value: Any) -> str | None:
    """A string, or a list of named templates of which "default" is for chats."""
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        return named.get("default")
    return value


def _token_text(value: Any) -> str | None:
    """A special token is its text, or an object with its text under "content"."""
    return value.get("content") if isinstance(value, dict) else value
