"""The tokenizer against Hugging Face's golden results, and each kind of vocabulary against its bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_service.text.tokenizer import Tokenizer, TokenizerFileError
from tests.support.byte_tokenizer import make_byte_tokenizer, make_sentencepiece_tokenizer

_FIXTURES = Path(__file__).parents[3] / "fixtures"
_GOLDEN: dict[str, Any] = json.loads((_FIXTURES / "golden" / "tokenizer.json").read_text())
_MODEL = Tokenizer.from_directory(_FIXTURES / "models" / "qwen3_moe")
_BYTES = make_byte_tokenizer()
_PIECES = make_sentencepiece_tokenizer()


@pytest.mark.parametrize("golden", _GOLDEN["texts"], ids=lambda g: repr(g["text"][:20]))
def test_golden_texts(golden: dict[str, Any]) -> None:
    """Ids with and without special tokens, and both ways back to text."""
    assert _MODEL.encode(golden["text"], add_special_tokens=True) == golden["ids"]
    assert _MODEL.encode(golden["text"], add_special_tokens=False) == golden["ids_no_special"]
    assert _MODEL.decode(golden["ids"], skip_special_tokens=False) == golden["decoded"]
    assert _MODEL.decode(golden["ids"], skip_special_tokens=True) == golden["decoded_skip_special"]


def test_vocabulary_size_and_padding_ids() -> None:
    """Ids of the embedding's padding rows have no bytes and are nothing special."""
    assert _MODEL.vocab_size == _GOLDEN["vocab_size"]
    assert _MODEL.token_bytes(_MODEL.vocab_size) == b""
    assert not _MODEL.is_special(10**9)


def test_every_byte_has_its_token() -> None:
    """The byte alphabet is read back exactly."""
    assert [_BYTES.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]


def test_added_tokens_are_literal() -> None:
    """Spaces and accents in an added token are themselves, not letters of the byte alphabet."""
    assert _BYTES.token_bytes(257) == "<tool é>".encode()
    assert (_BYTES.is_special(256), _BYTES.is_special(257)) == (True, False)


@given(st.text(max_size=50))
def test_saved_truncation_is_ignored(text: str) -> None:
    """A tokenizer.json saved with truncation does not cut prompts; every text comes back."""
    ids = _BYTES.encode(text, add_special_tokens=True)
    assert _BYTES.decode(ids, skip_special_tokens=False) == text


def test_byte_fallback_and_space_marks() -> None:
    """SentencePiece's pieces: the mark is a space, <0xNN> one byte, added tokens special."""
    ids = _PIECES.encode("hi ☃", add_special_tokens=True)
    assert ids[0] == 1
    assert _PIECES.decode(ids, skip_special_tokens=True) == " hi ☃"
    assert [_PIECES.token_bytes(2 + b) for b in range(256)] == [bytes([b]) for b in range(256)]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {}}'])
def test_broken_files_are_refused(tmp_path: Path, text: str) -> None:
    """A file that is no tokenizer is named as such."""
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerFileError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    """Without tokenizer.json the error says what writes one."""
    with pytest.raises(TokenizerFileError, match="save_pretrained"):
        Tokenizer.from_directory(tmp_path)


def test_tokenizers_without_exact_bytes_are_refused() -> None:
    """A WordPiece vocabulary has no bytes of its own for a token."""
    description = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {"[UNK]": 0},
        },
    }
    with pytest.raises(TokenizerFileError, match="WordPiece"):
        Tokenizer(json.dumps(description))
