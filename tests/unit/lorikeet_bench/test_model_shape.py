"""Shapes of released models: sizes as published, and a tokenizer that serves any of their tokens."""

from pathlib import Path

import pytest
import torch

from inference_service.models import describe_model, parameter_bytes
from inference_service.text.tokenizer import Tokenizer
from lorikeet_bench.model_shape import shape_config, shape_names, word_tokenizer, write_model_shape

# GiB in bfloat16 (gpt-oss: experts in MXFP4; fp8: what its config quantises), from published parameter counts
# and files.
PUBLISHED_GIB = {
    "deepseek-v2-lite": 29.3,
    "gpt-oss-120b": 60.8,
    "gpt-oss-20b": 12.8,
    "llama-3.3-70b": 131.4,
    "llama-3.3-70b-fp8": 67.7,
    "llama-4-scout": 200.7,
    "llama-4-scout-fp8": 105.2,
    "mixtral-8x7b": 87.0,
    "qwen3-30b-a3b": 56.9,
    "qwen3-30b-a3b-fp8": 29.0,
    "qwen3-32b": 61.0,
}


@pytest.mark.parametrize("name", shape_names())
def test_a_directory_describes_the_released_model(tmp_path: Path, name: str) -> None:
    """The server reads the config, and its weights have the published size."""
    path = write_model_shape(tmp_path / name, name, {"max_position_embeddings": 4096})
    description = describe_model(path)
    assert description.spec.max_position == 4096
    assert round(parameter_bytes(description.spec, torch.bfloat16) / 2**30, 1) == PUBLISHED_GIB[name]


def test_the_tokenizer_covers_the_vocabulary(tmp_path: Path) -> None:
    """Every token of the model's, its ends as special ones in their places."""
    path = write_model_shape(tmp_path, "mixtral-8x7b")
    tokenizer, description = Tokenizer.from_directory(path), describe_model(path)
    assert tokenizer.vocab_size == description.spec.vocab_size
    assert [i for i in range(32000) if tokenizer.is_special(i)] == list(description.defaults.eos_token_ids)


def test_text_becomes_bytes_and_tokens_become_text() -> None:
    """Both ways, for bytes, words and ends."""
    tokenizer = Tokenizer(word_tokenizer(1000, [999]))
    text = "Grüße, 世界!"
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    words = [tokenizer.token_bytes(i) for i in range(256, 999)]
    assert len(set(words)) == len(words)
    assert all(len(word) == 5 and word.startswith(b" ") for word in words)
    assert tokenizer.decode([256, 999], skip_special_tokens=True) == " aaaa"


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """An unknown shape or field by the names of all, a vocabulary without room for bytes by its size."""
    with pytest.raises(ValueError, match=r"'gpt-5' is none of .*gpt-oss-20b"):
        shape_config("gpt-5")
    with pytest.raises(ValueError, match=r"gpt-oss-20b has no bar and no foo; it has .*, vocab_size$"):
        write_model_shape(tmp_path, "gpt-oss-20b", {"foo": 1, "bar": None, "vocab_size": 300})
    with pytest.raises(ValueError, match="vocab_size 255 is less than"):
        write_model_shape(tmp_path, "gpt-oss-20b", {"vocab_size": 255})
    for wrong in ("many", None):
        with pytest.raises(ValueError, match=f"vocab_size {wrong!r} is no whole number"):
            write_model_shape(tmp_path, "gpt-oss-20b", {"vocab_size": wrong})


@pytest.mark.parametrize("num_layers", [1, 5, 24, 30])
def test_another_number_of_layers_has_as_many_kinds(tmp_path: Path, num_layers: int) -> None:
    """Their list is cut along, and where it is too short the model's own pattern goes on."""
    path = write_model_shape(tmp_path, "gpt-oss-20b", {"num_hidden_layers": num_layers})
    assert len(describe_model(path).spec.layers) == num_layers
