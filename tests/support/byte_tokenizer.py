"""Small tokenizers made in the test: one token a byte, or SentencePiece's shape with byte fallback."""

import json

from inference_service.text.tokenizer import Tokenizer


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable character for each byte, written independently of the code under test."""
    printable = set(range(ord("!"), ord("~") + 1)) | set(range(0xA1, 0xAC + 1)) | set(range(0xAE, 0xFF + 1))
    alphabet, spare = {}, 0
    for byte in range(256):
        if byte in printable:
            alphabet[byte] = chr(byte)
        else:
            alphabet[byte] = chr(256 + spare)
            spare += 1
    return alphabet


def make_byte_tokenizer() -> Tokenizer:
    """Token i is byte i; 256 is the special <|end|>, 257 the ordinary added token <tool é>."""
    return Tokenizer(byte_tokenizer_json())


def byte_tokenizer_json() -> str:
    """The same as a tokenizer.json."""
    vocabulary = {character: byte for byte, character in byte_alphabet().items()}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": {
                "direction": "Right",
                "max_length": 4,
                "strategy": "LongestFirst",
                "stride": 0,
            },
            "padding": None,
            "added_tokens": [
                _added(256, "<|end|>", special=True),
                _added(257, "<tool é>", special=False),
            ],
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
            "model": _bpe(vocabulary, byte_fallback=False),
        }
    )


def make_sentencepiece_tokenizer() -> Tokenizer:
    """<s>, the 256 byte tokens, and a few pieces with the space mark."""
    vocabulary = {"<unk>": 0, "<s>": 1}
    vocabulary.update({f"<0x{byte:02X}>": 2 + byte for byte in range(256)})
    for piece in ("▁", "h", "i", "▁h", "▁hi", "é"):
        vocabulary[piece] = len(vocabulary)
    merges = [["▁", "h"], ["▁h", "i"]]
    return Tokenizer(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [_added(0, "<unk>", special=True), _added(1, "<s>", special=True)],
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [
                        {"type": "Prepend", "prepend": "▁"},
                        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                    ],
                },
                "pre_tokenizer": None,
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [
                        {"SpecialToken": {"id": "<s>", "type_id": 0}},
                        {"Sequence": {"id": "A", "type_id": 0}},
                    ],
                    "pair": [
                        {"Sequence": {"id": "A", "type_id": 0}},
                        {"Sequence": {"id": "B", "type_id": 1}},
                    ],
                    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
                },
                "decoder": {
                    "type": "Sequence",
                    "decoders": [
                        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                        {"type": "ByteFallback"},
                        {"type": "Fuse"},
                        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                    ],
                },
                "model": {**_bpe(vocabulary, byte_fallback=True), "merges": merges, "unk_token": "<unk>"},
            }
        )
    )


def _added(token_id: int, content: str, *, special: bool) -> dict[str, object]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _bpe(vocabulary: dict[str, int], *, byte_fallback: bool) -> dict[str, object]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": byte_fallback,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": [],
    }
