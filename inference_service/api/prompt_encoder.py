"""Prompts to token ids, away from the event loop where that takes long."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from tokenizers import Encoding

from inference_service.api.field_errors import limit_error
from inference_service.api.generation_request import ChatPrompt, TextPrompt, prompt_field, too_long
from inference_service.api.reply_limits import MAX_TOKENIZE_TOKENS, tokenize_reply_too_large
from inference_service.domain.errors import LimitExceededError
from inference_service.text.bad_words import bad_word_tokens
from inference_service.text.chat_template import ChatTemplate
from inference_service.text.tokenizer import Tokenizer

# About a millisecond of tokenizing; longer texts would hold every other stream up.
_INLINE_CHARACTERS = 2_000
_MIN_TOKEN_BYTES = 16
# Rendering one turn takes as long as tokenizing so many characters.
_TURN_CHARACTERS = 40

T = TypeVar("T")


class PromptEncoder:
    """The model's tokenizer and chat template together."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, max_context_tokens: int) -> None:
        self.tokenizer = tokenizer
        self._template = template
        # No text of at most `max_context_tokens` tokens is longer than this.
        self._max_context_tokens = max_context_tokens
        self._max_text_bytes = max_context_tokens * max(tokenizer.max_token_bytes, _MIN_TOKEN_BYTES)

    async def encode(self, prompt: TextPrompt | ChatPrompt) -> list[int]:
        """Token ids of a prompt that leaves room for an answer.

        Raises:
            InvalidRequestError: the template refuses the chat.
            LimitExceededError: it does not fit the context. Known from its length alone where that tells.
        """
        return (await self._run(prompt, self._encode))[0]

    async def tokenize(self, prompt: TextPrompt | ChatPrompt) -> tuple[list[int], list[bytes], str]:
        """Token ids, their bytes and the rendered chat ("" for plain text); as many as fit a reply.

        Raises:
            InvalidRequestError, LimitExceededError: as `encode`, but the context counts in bytes only.
        """
        return await self._run(prompt, self._tokenize)

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that must not be completed."""
        if sum(map(len, words)) <= _INLINE_CHARACTERS:
            return bad_word_tokens(self.tokenizer, words)
        return await asyncio.to_thread(bad_word_tokens, self.tokenizer, words)

    async def _run(self, prompt: TextPrompt | ChatPrompt, work: Callable[[TextPrompt | ChatPrompt], T]) -> T:
        turns = prompt.turns if isinstance(prompt, ChatPrompt) else ()
        text = prompt.text if isinstance(prompt, TextPrompt) else ""
        num_characters = len(text) + sum(len(turn.role) + len(turn.content) for turn in turns)
        num_characters += prompt.num_json_bytes if isinstance(prompt, ChatPrompt) else 0
        if num_characters > self._max_text_bytes:
            raise self._too_large(prompt, num_characters)
        if num_characters + _TURN_CHARACTERS * len(turns) <= _INLINE_CHARACTERS:
            return work(prompt)
        return await asyncio.to_thread(work, prompt)

    def _encode(self, prompt: TextPrompt | ChatPrompt) -> tuple[list[int], str]:
        encoding, rendered = self._encoding(prompt)
        if len(encoding) >= self._max_context_tokens:
            raise too_long(prompt_field(prompt), len(encoding), self._max_context_tokens)
        return encoding.ids, rendered

    def _tokenize(self, prompt: TextPrompt | ChatPrompt) -> tuple[list[int], list[bytes], str]:
        encoding, rendered = self._encoding(prompt)
        # Before the ids are made into a list: that of ten million takes the interpreter lock for long.
        if len(encoding) > MAX_TOKENIZE_TOKENS:
            raise tokenize_reply_too_large(3 * len(encoding))
        ids = encoding.ids
        return ids, [self.tokenizer.token_bytes(i) for i in ids], rendered

    def _encoding(self, prompt: TextPrompt | ChatPrompt) -> tuple[Encoding, str]:
        if isinstance(prompt, TextPrompt):
            self._check_length(prompt, prompt.text)
            return self.tokenizer.encoding(prompt.text, add_special_tokens=prompt.add_special_tokens), ""
        rendered = self._template.render(
            prompt.turns,
            add_generation_prompt=prompt.add_generation_prompt,
            max_characters=self._max_text_bytes,
            arguments=prompt.arguments,
        )
        self._check_length(prompt, rendered)
        return self.tokenizer.encoding(rendered, add_special_tokens=False), rendered

    def _check_length(self, prompt: TextPrompt | ChatPrompt, text: str) -> None:
        num_bytes = len(text.encode())
        if num_bytes > self._max_text_bytes:
            raise self._too_large(prompt, num_bytes)

    def _too_large(self, prompt: TextPrompt | ChatPrompt, num_bytes: int) -> LimitExceededError:
        return limit_error(
            f"the prompt has {num_bytes} bytes or more; no text above {self._max_text_bytes} can "
            f"fit the context of {self._max_context_tokens} tokens: shorten it",
            prompt_field(prompt),
            "max_prompt_bytes",
            num_bytes,
            self._max_text_bytes,
        )
