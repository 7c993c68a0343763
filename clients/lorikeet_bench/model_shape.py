"""Directories of released models' shapes without their weights, for servers that make random ones.

`model_shapes/*.json` hold the fields of the released config.json files that decide sizes and arithmetic;
a file that names another in "of" holds those alone that differ from it.
"""

import json
import string
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import islice, product
from pathlib import Path
from typing import Any, cast

_SHAPES = files("lorikeet_bench") / "model_shapes"
_NUM_BYTES = 256


def shape_names() -> tuple[str, ...]:
    """The models whose shapes are known."""
    names = (entry.name.removesuffix(".json") for entry in _SHAPES.iterdir() if entry.name.endswith(".json"))
    return tuple(sorted(names))


def shape_config(name: str) -> dict[str, Any]:
    """The fields of a released config.json.

    Raises:
        ValueError: no such shape; the message lists all.
    """
    if name not in shape_names():
        raise ValueError(f"model shape {name!r} is none of {', '.join(shape_names())}")
    shape = json.loads((_SHAPES / f"{name}.json").read_text(encoding="utf-8"))
    return {**(shape_config(shape["of"]) if "of" in shape else {}), **shape["config"]}


def write_model_shape(directory: Path, name: str, changes: Mapping[str, object] | None = None) -> Path:
    """Write config.json and a tokenizer; serve the result with `--load-format dummy`.

    Args:
        directory: made where it is not there yet.
        name: one of `shape_names`.
        changes: fields of the shape with other values; None removes a field. With another number of layers
            the list of their kinds is cut, or left to the model's default where it is too short.

    Returns:
        `directory`.

    Raises:
        ValueError: no such shape or field, or a vocabulary that is no number, or too small for a tokenizer of
            bytes.
    """
    released = shape_config(name)
    if unknown := sorted(set(changes or {}) - set(released)):
        raise ValueError(
            f"model shape {name} has no {' and no '.join(unknown)}; it has {', '.join(sorted(released))}"
        )
    fields: dict[str, Any] = {**released, **(changes or {})}
    kinds, num_layers = fields.get("layer_types"), fields["num_hidden_layers"]
    if kinds and "layer_types" not in (changes or {}) and isinstance(num_layers, int):
        fields["layer_types"] = kinds[:num_layers] if 0 < num_layers <= len(kinds) else None
    config = {key: value for key, value in fields.items() if value is not None}
    ends = config.get("eos_token_id", [])
    end_ids = cast("list[int]", ends if isinstance(ends, list) else [ends])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    try:
        vocab_size = int(config["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"vocab_size {config.get('vocab_size')!r} is no whole number") from error
    tokenizer = word_tokenizer(vocab_size, end_ids)
    (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    return directory


def word_tokenizer(vocab_size: int, end_ids: Sequence[int] = ()) -> str:
    """A tokenizer.json that gives every token a text: ids 0 to 255 are bytes, the others are short words.

    Prompts become one token a byte; output decodes to about four bytes a token, as natural text does.

    Raises:
        ValueError: less than 256 tokens.
    """
    if vocab_size < _NUM_BYTES:
        raise ValueError(
            f"vocab_size {vocab_size} is less than the {_NUM_BYTES} bytes that a tokenizer needs"
        )
    tokens = [*_byte_tokens(), *islice(_words(), vocab_size - _NUM_BYTES)]
    ends = [(f"<|end_{end_id}|>", end_id) for end_id in sorted({*end_ids}) if end_id < vocab_size]
    for content, end_id in ends:
        # In the vocabulary too: an added token that is not gets the first free id instead of its own.
        tokens[end_id] = content
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [_special(content, end_id) for content, end_id in ends],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": False,
            },
            "post_processor": None,
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            },
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocabulary,
                "merges": [],
            },
        }
    )


def _byte_tokens() -> list[str]:
    """GPT-2's alphabet: itself where a byte is printable in Latin-1, else a character from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(_NUM_BYTES)]


def _words() -> Iterator[str]:
    """More than any vocabulary has: four letters behind a space."""
    for word in product(string.ascii_letters, *[string.ascii_lowercase] * 3):
        yield f"\u0120{''.join(word)}"


def _special(content: str, token_id: int) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": True}
