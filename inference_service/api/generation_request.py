"""What a client asked, parsed and checked, before its tokens are known. `convert` makes it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inference_service.domain.engine import EngineInfo
from inference_service.domain.errors import LimitExceededError
from inference_service.domain.sampling import SamplingParams
from inference_service.domain.structured_output import Constraint
from inference_service.text.chat_template import ChatTurn
from inference_service.text.sampling_defaults import SamplingDefaults


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text. `add_special_tokens`: the tokenizer's own, such as a leading BOS."""

    text: str
    add_special_tokens: bool = True


def _no_arguments() -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the model's chat template, which has the special tokens itself.

    `arguments` are further variables of the template. `num_json_bytes` is the size of the texts that they and
    the turns' fields were read from: what rendering may have to go through.
    """

    turns: tuple[ChatTurn, ...]
    add_generation_prompt: bool = True
    arguments: Mapping[str, Any] = field(default_factory=_no_arguments)
    num_json_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used as they are."""

    ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class RequestRules:
    """What requests are checked against: the engine's limits and the model's defaults."""

    info: EngineInfo
    defaults: SamplingDefaults


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """Sampling with defaults filled in, as far as that needs no prompt length.

    `params.max_tokens` and `params.seed` count only where `max_tokens` and `seed` are None: the first is then
    the most that the model's defaults allow, the second is drawn. `bad_words` are text still. `num_samples`
    answers are wanted. `constraint` is what the answer must look like, not compiled yet; with `ends_late` it
    ends only where nothing else may come.
    """

    params: SamplingParams
    max_tokens: int | None = None
    seed: int | None = None
    bad_words: tuple[str, ...] = ()
    num_samples: int = 1
    constraint: Constraint | None = None
    ends_late: bool = False

    def resolve(
        self,
        num_prompt_tokens: int,
        max_context_tokens: int,
        drawn_seed: int,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> SamplingParams:
        """Fit the output into what the prompt leaves of the context; `bad_words` are the request's tokens.

        Raises:
            LimitExceededError: the prompt fills the context, `max_tokens` asks for more than is left, or
                `min_tokens` for more than that.
        """
        room = max_context_tokens - num_prompt_tokens
        if room < 1:
            raise too_long("input", num_prompt_tokens, max_context_tokens)
        if self.max_tokens is not None and self.max_tokens > room:
            raise LimitExceededError(
                f"sampling.max_tokens is {self.max_tokens} and the prompt has {num_prompt_tokens} tokens, "
                f"together more than the context of {max_context_tokens}: ask for at most {room}, or leave "
                "max_tokens out",
                metadata={
                    "field": "sampling.max_tokens",
                    "limit": "max_context_tokens",
                    "value": str(self.max_tokens),
                    "maximum": str(room),
                },
            )
        max_tokens = self.max_tokens if self.max_tokens is not None else min(room, self.params.max_tokens)
        if self.params.min_tokens > max_tokens:
            raise LimitExceededError(
                f"sampling.min_tokens is {self.params.min_tokens}, more than the {max_tokens} tokens that "
                f"this request may have: ask for at most {max_tokens}, or raise max_tokens",
                metadata={
                    "field": "sampling.min_tokens",
                    "limit": "max_tokens",
                    "value": str(self.params.min_tokens),
                    "maximum": str(max_tokens),
                },
            )
        return dataclasses.replace(
            self.params,
            max_tokens=max_tokens,
            seed=self.seed if self.seed is not None else drawn_seed,
            bad_words=bad_words,
        )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One Generate or Complete. `adapter` None is the base model; `request_id` None has one made."""

    prompt: Prompt
    sampling: SamplingRequest
    request_id: str | None = None
    adapter: str | None = None


def prompt_field(prompt: Prompt) -> str:
    """The request's field that a prompt came in."""
    match prompt:
        case TextPrompt():
            return "prompt"
        case ChatPrompt():
            return "chat"
        case TokenPrompt():
            return "token_ids"


def too_long(field: str, num_prompt_tokens: int, max_context_tokens: int) -> LimitExceededError:
    """The error for a prompt, in this field, that leaves no room for an answer."""
    return LimitExceededError(
        f"the prompt has {num_prompt_tokens} tokens; the context holds {max_context_tokens}, one of them for "
        "the answer: shorten the prompt",
        metadata={
            "field": field,
            "limit": "max_context_tokens",
            "value": str(num_prompt_tokens),
            "maximum": str(max_context_tokens - 1),
        },
    )
