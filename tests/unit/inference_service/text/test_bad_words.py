"""Texts to token sequences that must not be generated."""

from inference_service.text.bad_words import bad_word_tokens
from inference_service.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import byte_tokenizer_json
from tests.support.fixtures import FIXTURES


def test_without_merges_the_space_is_a_token_of_its_own() -> None:
    """One form suffices then: it follows the space too. Leading space is no part of the text."""
    tokenizer = Tokenizer(byte_tokenizer_json())
    assert bad_word_tokens(tokenizer, [" no", "no", "x"]) == ((110, 111), (120,))


def test_with_merges_both_forms_count() -> None:
    """Every sequence spells its text, with the space or without; equal lengths and another beginning."""
    tokenizer = Tokenizer.from_directory(FIXTURES / "models" / "qwen3_moe")
    words = ["the", "a", "zqx", "in"]
    sequences = bad_word_tokens(tokenizer, words)
    spelled = [b"".join(map(tokenizer.token_bytes, sequence)).decode() for sequence in sequences]
    assert [text for text in spelled if not text.startswith(" ")] == words
    spaced = [text for text in spelled if text.startswith(" ")]
    assert spaced, "the fixture's tokenizer merges a space into none of these"
    for text in spaced:
        bare, merged = sequences[spelled.index(text[1:])], sequences[spelled.index(text)]
        assert (len(bare), bare[0] == merged[0]) == (len(merged), False)
