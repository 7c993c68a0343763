"""Checkpoints onto a GPU: the same bits as on a CPU, through pinned buffers, without a second copy."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from inference_service.models import CheckpointError, LoadedModel, describe_model, load_model
from inference_service.models import weight_reader as weight_reader_module
from inference_service.models.stored_tensors import TensorShape, stored_tensors
from lorikeet_kernels.experts.mxfp4 import Mxfp4Weight
from lorikeet_kernels.experts.mxfp4_layout import lay_out_mxfp4
from tests.support import tiny_gpt_oss, tiny_model


def load(
    path: Path, device: str, dtype: torch.dtype = torch.bfloat16, load_format: str = "auto"
) -> LoadedModel:
    """The model of a directory."""
    return load_model(
        describe_model(path),
        dtype=dtype,
        device=torch.device(device),
        num_positions=32,
        load_format=load_format,
    )


def tensors(model: object, path: str = "") -> dict[str, Any]:
    """Every tensor that hangs on `model`, and packed weights whole, by the way to it."""
    if isinstance(model, torch.Tensor):
        return {path: model}
    if type(model).__name__ in ("Mxfp4Weight", "Mxfp4DeviceWeight"):
        return {path: model}
    if isinstance(model, list | tuple):
        parts = {str(index): part for index, part in enumerate(model)}
    elif type(model).__module__.startswith("inference_service"):
        names = [*getattr(model, "__dict__", {}), *getattr(type(model), "__slots__", ())]
        parts = {name: getattr(model, name) for name in names}
    else:
        return {}
    return {k: v for name, part in parts.items() for k, v in tensors(part, f"{path}.{name}").items()}


def compare(path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Every tensor on the GPU against its twin on the CPU."""
    on_cpu, on_gpu = tensors(load(path, "cpu", dtype).decoder), tensors(load(path, "cuda", dtype).decoder)
    assert on_cpu.keys() == on_gpu.keys()
    assert len(on_cpu) > 10
    for name, expected in on_cpu.items():
        found = on_gpu[name]
        if isinstance(expected, Mxfp4Weight):
            laid_out = lay_out_mxfp4(expected, pairing=found.pairing)
            assert torch.equal(found.words.cpu(), laid_out.words), name
            assert torch.equal(found.scales.cpu(), laid_out.scales), name
        else:
            assert torch.equal(found.cpu(), expected), name


@pytest.mark.parametrize("piece_bytes", [256, 16 << 20])
@pytest.mark.parametrize("is_packed", [False, True])
def test_gpt_oss_has_the_bits_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_packed: bool, piece_bytes: int
) -> None:
    """Packed experts laid out on the device; plain ones turned round there. Buffers are used many times."""
    monkeypatch.setattr(weight_reader_module, "PIECE_BYTES", piece_bytes)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 5, "layer_types": None}
    config = tiny_gpt_oss.CONFIG | sizes
    weights = tiny_gpt_oss.make_weights(config)
    if not is_packed:
        compare(tiny_gpt_oss.write_gpt_oss(tmp_path, weights, **sizes))
        return
    fields = {**sizes, "quantization_config": tiny_gpt_oss.QUANTIZATION}
    compare(tiny_gpt_oss.write_gpt_oss(tmp_path, tiny_gpt_oss.pack_experts(weights), **fields))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_stored_float32_is_rounded_on_the_device(tmp_path: Path, dtype: torch.dtype) -> None:
    """As on the CPU, in shards."""
    compare(tiny_model.write_model(tmp_path, num_shards=3), dtype)


def test_a_value_that_is_not_finite_is_named(tmp_path: Path) -> None:
    """One of hundreds that make up a parameter, and nothing else."""
    weights = tiny_model.make_weights(tiny_model.CONFIG)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    weights[name][3, 5] = np.nan
    with pytest.raises(
        CheckpointError, match=rf"fit its config.json: 1 with infinities or NaNs: {name} \(F32\)$"
    ):
        load(tiny_model.write_model(tmp_path, weights), "cuda")


def test_the_device_holds_little_more_than_the_weights(tmp_path: Path) -> None:
    """At most one layer of packed experts beside what stays."""
    sizes: dict[str, Any] = {
        "hidden_size": 512, "intermediate_size": 512, "num_local_experts": 16, "num_hidden_layers": 12,
        "layer_types": None, "num_attention_heads": 8,
    }  # fmt: skip
    fields = {**sizes, "quantization_config": tiny_gpt_oss.QUANTIZATION}
    directory = tiny_gpt_oss.write_gpt_oss(tmp_path, {}, **fields)
    shapes = stored_tensors(describe_model(directory).spec)

    def values(of: TensorShape) -> torch.Tensor:
        kind = torch.uint8 if of.is_packed else torch.bfloat16
        return torch.full(of.shape, 120 if of.is_packed else 1, dtype=kind)

    save_file({name: values(of) for name, of in shapes.items()}, directory / "model.safetensors")
    load(directory, "cuda")  # libraries' own memory
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load(directory, "cuda")
    kept = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    layer = sum(math.prod(of.shape) for name, of in shapes.items() if of.is_packed and ".0.mlp" in name)
    assert peak - kept < 1.6 * layer  # a layer as stored, and what laying out one expert takes
    del model
