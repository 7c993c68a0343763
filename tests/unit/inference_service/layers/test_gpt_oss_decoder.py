"""The GPT-OSS decoder against its transcription in numpy, at sizes that the golden fixtures leave out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import gpt_oss_reference
from tests.support.runner import GREEDY, DrivenRequest, drive, make_backend
from tests.support.tiny_gpt_oss import CONFIG, make_weights, write_gpt_oss

TOKENS = [3, 17, 17, 0, 39, 8, 21, 2, 5, 30, 11, 12, 13, 14, 15, 16, 18, 19, 20, 22, 47, 46, 1, 1, 9]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": 1},
        {"sliding_window": 17, "layer_types": ["full_attention", "sliding_attention"]},
        {"num_local_experts": 3, "num_experts_per_tok": 3, "intermediate_size": 7},
        {"num_local_experts": 13, "num_experts_per_tok": 1, "hidden_size": 40},
        {"swiglu_limit": 0.5},
        {"num_key_value_heads": 4, "head_dim": 8},
        {"rope_scaling": CONFIG["rope_scaling"] | {"factor": 32.0, "original_max_position_embeddings": 16}},
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk", [5, 1 << 30])
def test_against_the_transcription(tmp_path: Path, fields: dict[str, Any], chunk: int) -> None:
    """Log-probabilities of every prompt position, in chunks and whole."""
    config = CONFIG | fields
    weights = make_weights(config)
    backend = make_backend(
        model_dir=str(write_gpt_oss(tmp_path, weights, **fields)), max_context_tokens=64, num_blocks=32
    )
    vocab = config["vocab_size"]
    sampling = replace(GREEDY, logprobs=vocab, prompt_logprobs=vocab)
    [driven] = drive(backend, [DrivenRequest(TOKENS, sampling=sampling)], num_tokens=1, chunk=chunk)
    got = np.zeros((len(TOKENS), vocab))
    for row, entry in zip(got, [*driven.prompt_logprobs, driven.logprobs[0]], strict=True):
        row[list(entry.top_ids)] = entry.top_logprobs
    expected = gpt_oss_reference.logprobs(config, weights, TOKENS)
    np.testing.assert_allclose(got, expected, atol=2e-4, rtol=0)


def test_the_activation_limits_are_reached() -> None:
    """The weights above make gates and ups cross the limit; otherwise the tests would not see the clamp."""
    weights = make_weights()
    there = gpt_oss_reference.logprobs(CONFIG, weights, TOKENS)
    without = gpt_oss_reference.logprobs(CONFIG | {"swiglu_limit": 1e9}, weights, TOKENS)
    assert np.abs(there - without).max() > 0.01
