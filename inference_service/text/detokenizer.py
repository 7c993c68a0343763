"""Tokens to text, one at a time, never half a character.

Characters may be spread over tokens. Joined, the pieces are exactly `bytes.decode("utf-8", "replace")` of
all the tokens' bytes: a byte that can start no character becomes U+FFFD as soon as that is certain, a genuine
U+FFFD in the model's output passes at once, and a character cut by the end becomes one U+FFFD in `finish`.
"""

import codecs

from inference_service.text.tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One request's text so far; holds at most three bytes."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = _new_decoder("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left when no more tokens come: U+FFFD for a cut character, else nothing."""
        return self._decoder.decode(b"", final=True)
