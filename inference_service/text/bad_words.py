"""Texts that must not be generated, as the token sequences that spell them."""

from collections.abc import Sequence

from inference_service.text.tokenizer import Tokenizer


def bad_word_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Each text as the tokenizer writes it at the beginning of a text and within one.

    As in vLLM: the second form, with one space before it, counts where it has as many tokens as the first and
    begins with another one; else the space is a token of its own, and the first form follows it.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if bare:
            sequences.append(bare)
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                sequences.append(spaced)
    return tuple(dict.fromkeys(sequences))
