"""Prompts to token ids, away from the event loop where that takes long."""

import asyncio

from inference_service.api.generation_request import ChatPrompt, TextPrompt
from inference_service.domain.errors import LimitExceededError
from inference_service.text.chat_template import ChatTemplate
from inference_service.text.tokenizer import Tokenizer

# About a millisecond of tokenizing; longer texts would hold every other stream up.
_INLINE_CHARACTERS = 2_000
_MIN_TOKEN_BYTES = 16


class PromptEncoder:
    """The model's tokenizer and chat template together."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, max_context_tokens: int) -> None:
        self.tokenizer = tokenizer
        self._template = template
        # No text of at most `max_context_tokens` tokens is longer than this.
        self._max_text_bytes = max_context_tokens * max(tokenizer.max_token_bytes, _MIN_TOKEN_BYTES)

    async def encode(self, prompt: TextPrompt | ChatPrompt) -> tuple[list[int], str]:
        """Token ids, and the rendered chat ("" for plain text).

        Raises:
            InvalidRequestError: the template refuses the chat.
            LimitExceededError: the text is so long that it cannot fit the context, whatever its tokens are.
        """
        size = (
            sum(len(t.content) for t in prompt.turns) if isinstance(prompt, ChatPrompt) else len(prompt.text)
        )
        if size <= _INLINE_CHARACTERS:
            return self._encode(prompt)
        return await asyncio.to_thread(self._encode, prompt)

    def _encode(self, prompt: TextPrompt | ChatPrompt) -> tuple[list[int], str]:
        if isinstance(prompt, TextPrompt):
            self._check_length(prompt.text)
            return self.tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens), ""
        rendered = self._template.render(
            prompt.turns,
            add_generation_prompt=prompt.add_generation_prompt,
            max_characters=self._max_text_bytes,
        )
        self._check_length(rendered)
        return self.tokenizer.encode(rendered, add_special_tokens=False), rendered

    def _check_length(self, text: str) -> None:
        num_bytes = len(text.encode())
        if num_bytes > self._max_text_bytes:
            raise LimitExceededError(
                f"the prompt has {num_bytes} bytes; no text above {self._max_text_bytes} can fit the context",
                metadata={
                    "field": "input",
                    "limit": "max_context_tokens",
                    "value": str(num_bytes),
                    "maximum": str(self._max_text_bytes),
                },
            )
