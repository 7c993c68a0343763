"""Tiny checkpoints brought to FP8 by code of the tests' own, in every form, with what they stand for."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

E4M3 = torch.float8_e4m3fn
FORMS: dict[str, dict[str, Any]] = {
    "block": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "static": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "kv_cache_scheme": None,
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            }
        },
    },
    "bounded": {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 2.0,
        "modules_to_not_convert": ["lm_head"],
    },
}


@dataclass(frozen=True, slots=True)
class Fp8Checkpoint:
    """What is written, and each weight in float64; `input_scales` of modules with static ones."""

    tensors: dict[str, torch.Tensor]
    exact: dict[str, torch.Tensor]
    input_scales: dict[str, float]


def is_projection(name: str) -> bool:
    """Whether a weight is one that FP8 checkpoints quantise: no embedding, head, router or norm."""
    return name.endswith("_proj.weight")


def quantize(weights: dict[str, np.ndarray], form: str, skipped: tuple[str, ...] = ()) -> Fp8Checkpoint:
    """Bring the projections to `form`, those below `skipped` excepted."""
    rng = np.random.default_rng(7)
    tensors: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    inputs: dict[str, float] = {}
    for name, array in weights.items():
        weight = torch.from_numpy(array)
        module = name.removesuffix(".weight")
        if not is_projection(name) or module.startswith(skipped):
            tensors[name], exact[module] = weight, weight.double()
            continue
        values, scales, factors = quantized_matrix(weight, form)
        suffix = "weight_scale_inv" if form == "block" else "weight_scale"
        tensors |= {name: values, f"{module}.{suffix}": scales}
        exact[module] = values.double() * factors.double()
        if form == "static":
            inputs[module] = float(np.float32(rng.uniform(0.005, 0.02)))
            tensors[f"{module}.input_scale"] = torch.tensor(inputs[module])
    return Fp8Checkpoint(tensors, exact, inputs)


def quantized_matrix(weight: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scales as they are stored, and scales spread over the elements."""
    rows, columns = weight.shape
    if form == "block":
        scales = torch.empty(-(-rows // 128), -(-columns // 128))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = weight[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
                scales[i, j] = part.abs().max() / 448
        factors = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    elif form in ("tensor", "static"):
        scales = weight.abs().max() / 448
        if form == "static":
            scales = scales.view(1)
        factors = scales.expand(rows, columns)
    else:
        scales = weight.abs().amax(dim=1, keepdim=True) / 448
        if form == "channel":  # such tools store scales in the model's dtype
            scales = scales.to(torch.bfloat16)
        factors = scales.float().expand(rows, columns)
    return (weight / factors).clamp(-448, 448).to(E4M3), scales, factors


def quantized_rows(x: torch.Tensor, form: str, input_scale: float | None = None) -> torch.Tensor:
    """What float64 rows stand for once they were quantised as `form` asks."""
    out = torch.empty_like(x)
    width = 128 if form == "block" else x.shape[-1]
    for first in range(0, x.shape[-1], width):
        part = x[..., first : first + width].float()
        if input_scale is not None:
            scale = torch.tensor(input_scale)
        else:
            peak = part.abs().amax(dim=-1, keepdim=True)
            scale = (peak.clamp(max=2.0) if form == "bounded" else peak) / 448
        out[..., first : first + width] = (part / scale).clamp(-448, 448).to(E4M3).double() * scale.double()
    return out


def write_fp8(
    path: Path, checkpoint: Fp8Checkpoint, config: dict[str, Any], form: str, **changes: Any
) -> Path:
    """Write a model directory; `changes` are of the quantization_config (None removes a field)."""
    quantization = {k: v for k, v in (FORMS[form] | changes).items() if v is not None}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save_file(checkpoint.tensors, path / "model.safetensors")
    return path
