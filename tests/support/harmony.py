"""The Harmony fixture, and a gpt-oss that speaks it: each token is followed by one that the test chose."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.fixtures import FIXTURES
from tests.support.tiny_gpt_oss import CONFIG, make_weights, write_gpt_oss

HARMONY = FIXTURES / "harmony"
CASES: list[dict[str, Any]] = json.loads((HARMONY / "cases.json").read_text())
_DOCUMENT: dict[str, Any] = json.loads((HARMONY / "expected.json").read_text())
NOW: str = _DOCUMENT["now"]
EXPECTED: dict[str, dict[str, Any]] = _DOCUMENT["expected"]
SPECIAL: dict[str, int] = {
    token["content"]: token["id"]
    for token in json.loads((HARMONY / "tokenizer.json").read_text())["added_tokens"]
}
# The released generation_config.json stops at the same three.
STOP_TOKENS = ("<|return|>", "<|endoftext|>", "<|call|>")
VOCAB = 256 + len(SPECIAL)


def token_of(text: str) -> int:
    """The id of a special token or of one ASCII character."""
    return SPECIAL[text] if text in SPECIAL else ord(text)


def write_harmony_model(path: Path, followed_by: Mapping[str, str]) -> Path:
    """A gpt-oss of one layer that adds nothing: the head alone names each token's successor.

    A token that `followed_by` leaves out is followed by itself.
    """
    fields: dict[str, Any] = {
        "hidden_size": VOCAB,
        "vocab_size": VOCAB,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    weights = {name: np.zeros_like(value) for name, value in make_weights(CONFIG | fields).items()}
    for name, value in weights.items():
        if "norm" in name:
            value[:] = 1
    weights["model.embed_tokens.weight"] = np.eye(VOCAB, dtype=np.float32)
    head = np.eye(VOCAB, dtype=np.float32)
    for token, successor in followed_by.items():
        head[:, token_of(token)] = 0
        head[token_of(successor), token_of(token)] = 1
    weights["lm_head.weight"] = head
    write_gpt_oss(path, weights, **fields)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copyfile(HARMONY / name, path / name)
    stops = [SPECIAL[token] for token in STOP_TOKENS]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return path
