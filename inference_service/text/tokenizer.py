"""The model's tokenizer: text to token ids, and each token's own bytes.

Reads the `tokenizer.json` of Hugging Face's tokenizers library. Safe to use from several threads.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as _HuggingFaceTokenizer

_METASPACE = "\u2581"


class TokenizerFileError(ValueError):
    """tokenizer.json is missing, broken or of a kind that has no exact bytes for each token."""


class Tokenizer:
    """Token ids of a text, and the bytes of a token.

    `vocab_size` is one more than the largest id that the tokenizer itself knows; the model's embedding may
    have more rows (padding). Such ids have no bytes.
    """

    def __init__(self, tokenizer_json: str) -> None:
        try:
            description: dict[str, Any] = json.loads(tokenizer_json)
            self._tokenizer = _HuggingFaceTokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerFileError(f"tokenizer.json cannot be read: {error}") from error
        # A file saved with these would silently cut prompts or pad them.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        to_bytes = _byte_reader(description.get("decoder"))
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self._bytes = [b""] * self.vocab_size
        for token, token_id in vocabulary.items():
            self._bytes[token_id] = to_bytes(token)
        for token_id, token in added.items():
            # Literal text: an added token never went through the byte alphabet.
            self._bytes[token_id] = token.content.encode()
        self.max_token_bytes: int = max(map(len, self._bytes), default=0)

    @classmethod
    def from_directory(cls, model_dir: Path) -> "Tokenizer":
        """Read `model_dir`/tokenizer.json."""
        path = model_dir / "tokenizer.json"
        try:
            return cls(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerFileError(
                f"{path} cannot be read ({error}); the model directory needs a tokenizer.json, which "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes"
            ) from error

    def to_json(self) -> str:
        """The tokenizer.json as it is used here: without truncation and padding."""
        return self._tokenizer.to_str()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Special tokens written out in it become those tokens, as everywhere else.

        Args:
            text: any text.
            add_special_tokens: let the tokenizer's post-processor add its own, such as a leading BOS.
        """
        return self.encoding(text, add_special_tokens=add_special_tokens).ids

    def encoding(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """What `encode` takes its ids from: its length is known without a list of them."""
        # The batch call releases the interpreter lock, the single one does not.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, which may be a part of a character; empty for padding ids."""
        return self._bytes[token_id] if token_id < self.vocab_size else b""

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves it out of the text. Padding ids have no text either way."""
        return token_id in self._special

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The whole text at once; the incremental detokenizer yields exactly this, in pieces."""
        kept = (i for i in token_ids if not (skip_special_tokens and i in self._special))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")


def _byte_reader(decoder: dict[str, Any] | None) -> "_ByteLevel | _ByteFallback":
    """How to read a vocabulary entry's bytes, from the file's own decoder."""
    steps: list[dict[str, Any]] = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _ByteLevel()
    if kinds & {"ByteFallback", "Metaspace"}:
        replaced = [(s["pattern"].get("String"), s["content"]) for s in steps if s["type"] == "Replace"]
        replaced += [(s.get("replacement", _METASPACE), " ") for s in steps if s["type"] == "Metaspace"]
        return _ByteFallback([(old, new) for old, new in replaced if old])
    shown = ", ".join(sorted(kinds)) or "none"
    raise TokenizerFileError(
        f"tokenizer.json has decoder {shown}; supported are ByteLevel (GPT-2 style) and ByteFallback or "
        "Metaspace (SentencePiece style), in which every token stands for exact bytes"
    )


class _ByteLevel:
    """GPT-2's alphabet: one printable character for each byte."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [b for b in range(256) if b not in printable]
        self._byte_of = {chr(b): b for b in printable}
        self._byte_of.update({chr(0x100 + i): b for i, b in enumerate(others)})

    def __call__(self, token: str) -> bytes:
        try:
            return bytes(self._byte_of[c] for c in token)
        except KeyError:  # not in the alphabet: the library, too, takes such a token literally
            return token.encode()


class _ByteFallback:
    """SentencePiece: text with a mark for the space, and tokens <0x00> to <0xFF> for single bytes.

    The decoder's Strip step, which drops one leading space of a whole text, does not apply: what is generated
    continues a prompt, and its first space is real.
    """

    def __init__(self, replacements: list[tuple[str, str]]) -> None:
        self._replacements = replacements
        self._byte_of = {f"<0x{b:02X}>": bytes([b]) for b in range(256)}

    def __call__(self, token: str) -> bytes:
        if token in self._byte_of:
            return self._byte_of[token]
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()
