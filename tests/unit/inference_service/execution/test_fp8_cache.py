"""Keys and values in FP8: scales from the checkpoint, answers near those of a whole cache, less memory."""

from pathlib import Path

import numpy as np
import pytest
import structlog
import torch

from inference_service.execution.backend import DeviceBackend
from inference_service.execution.kv_cache import block_bytes, cache_dtype
from inference_service.models import CheckpointError, ModelConfigError, describe_model
from lorikeet_kernels.attention.kv_scales import FP8, dequantize_heads, quantize_heads
from tests.support.fixtures import FIXTURES
from tests.support.runner import GREEDY, DrivenRequest, drive, make_backend
from tests.support.tiny_model import CONFIG, make_weights, write_model

CPU = torch.device("cpu")
PROMPT = (3, 17, 17, 0, 39, 8, 21, 2, 5, 30, 11, 12, 13, 14, 15, 16, 18, 19)
PREFIX = "model.layers.{}.self_attn."


def make(path: Path, **settings: object) -> DeviceBackend:
    """A small backend of the tiny model."""
    return make_backend(model_dir=str(path), max_context_tokens=64, num_blocks=8, **settings)


def write(path: Path, scales: dict[str, np.ndarray]) -> Path:
    """The tiny model with more tensors in its checkpoint."""
    return write_model(path, make_weights(CONFIG) | scales)


def logprobs(backend: DeviceBackend) -> torch.Tensor:
    """Of every token after a prompt that comes in two chunks, and after three more tokens, [N, V]."""
    sampling = type(GREEDY)(max_tokens=4, temperature=0.0, prompt_logprobs=40, logprobs=40)
    (driven,) = drive(backend, [DrivenRequest(PROMPT, sampling=sampling)], num_tokens=4, chunk=10)
    rows = [*driven.prompt_logprobs, *driven.logprobs]
    found = torch.zeros(len(rows), 40)
    for row, entry in zip(found, rows, strict=True):
        row[list(entry.top_ids)] = torch.tensor(entry.top_logprobs)
    return found


def test_a_cache_in_fp8_is_near_a_whole_one(tmp_path: Path) -> None:
    """Off by some hundredths, with scales of 1 and better ones; a whole cache takes no notice of scales."""
    plain = write_model(tmp_path / "plain")
    scaled = write(
        tmp_path / "scaled",
        {
            f"{PREFIX.format(layer)}{kind}_scale": np.full(shape, value, np.float32)
            for layer in range(2)
            for kind, shape, value in (("k", (), 0.02), ("v", (2,), 0.004))
        },
    )
    expected = logprobs(make(plain))
    assert torch.equal(logprobs(make(scaled)), expected)
    for path in (plain, scaled):
        for name in ("fp8", "fp8_e4m3"):
            backend = make(path, kv_cache_dtype=name)
            assert {cache.keys.dtype for cache in backend.runner._forward.cache} == {FP8}
            error = (logprobs(backend) - expected).norm() / expected.norm()
            assert 1e-4 < error < 0.05


def test_scales_follow_their_heads(tmp_path: Path) -> None:
    """One number for all, one for each, under every name that tools write; others' tensors stay unused."""
    path = write(
        tmp_path,
        {
            PREFIX.format(0) + "k_scale": np.array([0.5], np.float32),
            PREFIX.format(0) + "v_scale": np.array([0.25, 2.0], np.float32),
            PREFIX.format(0) + "q_scale": np.array(9.0, np.float32),
            PREFIX.format(1) + "k_proj.k_scale": np.array(3.0, np.float32),
            PREFIX.format(1) + "v_proj.output_scale": np.array(4.0, np.float32),
        },
    )
    first, second = (cache.scales for cache in make(path, kv_cache_dtype="fp8").runner._forward.cache)
    assert first is not None
    assert second is not None
    assert first.keys.tolist() == [0.5, 0.5]
    assert first.values.tolist() == [0.25, 2.0]
    assert second.keys.tolist() == [3.0, 3.0]
    assert second.values.tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones(3, np.float32), r"k_scale is \[3\]; a scale .* one for each of 2 heads"),
        (np.array(0.0, np.float32), "is not above 0"),
        (np.array(-1.0, np.float32), "is not above 0"),
    ],
)
def test_odd_scales_are_refused(tmp_path: Path, value: np.ndarray, message: str) -> None:
    """By their tensor's name."""
    path = write(tmp_path, {PREFIX.format(0) + "k_scale": value})
    with pytest.raises(CheckpointError, match=message):
        make(path, kv_cache_dtype="fp8")


def test_a_cache_of_latents_is_refused() -> None:
    """It has no keys and values to scale."""
    spec = describe_model(FIXTURES / "models" / "deepseek_v2").spec
    layers = [layer.attention for layer in spec.layers]
    assert cache_dtype("auto", layers, torch.bfloat16, CPU) == torch.bfloat16
    with pytest.raises(ModelConfigError, match="caches latents"):
        cache_dtype("fp8", layers, torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        ("qwen3_moe", {}, ("none", "float32")),
        ("qwen3_moe", {"kv_cache_dtype": "fp8"}, ("none", "float8_e4m3fn")),
        ("qwen3_moe", {"quantization": "fp8"}, ("fp8", "float32")),
        ("gpt_oss_mxfp4", {}, ("mxfp4", "float32")),
    ],
)
def test_the_start_says_what_is_in_fp8(model: str, settings: dict[str, str], said: tuple[str, str]) -> None:
    """Weights by the checkpoint's method or the one asked for, and the cache."""
    with structlog.testing.capture_logs() as lines:
        make_backend(model, **settings)
    (loaded,) = (line for line in lines if line["event"] == "engine.loaded")
    assert (loaded["quantization"], loaded["kv_cache_dtype"]) == said


def test_blocks_take_half(tmp_path: Path) -> None:
    """Of what they take in bfloat16."""
    spec = describe_model(write_model(tmp_path, {})).spec
    layers = [layer.attention for layer in spec.layers]
    assert 2 * block_bytes(layers, 16, FP8) == block_bytes(layers, 16, torch.bfloat16)


def test_values_beyond_the_range_take_the_largest() -> None:
    """Others are off by a sixteenth at most."""
    scales = torch.tensor([0.5, 2.0])
    x = torch.randn(50, 2, 8)
    read = dequantize_heads(quantize_heads(x, scales), scales)
    assert bool(((read - x).abs() <= (x.abs() / 16).clamp(min=2**-9)).all())
    x[0] = 1e6
    largest = dequantize_heads(quantize_heads(x, scales), scales)[0]
    assert largest.unique(dim=1).flatten().tolist() == [224.0, 896.0]
