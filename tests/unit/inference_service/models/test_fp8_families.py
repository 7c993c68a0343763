"""Every family's fixture brought to FP8: all tensors are used, and answers are those of the same weights."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference_service.execution import backend as backend_module
from inference_service.execution.backend import DeviceBackend
from inference_service.execution.warm_up_ops import linears
from inference_service.layers import moe as moe_module
from inference_service.layers.batch import LoraBatch
from inference_service.layers.latent_attention import LatentAttention
from inference_service.layers.linear import Linear
from inference_service.models import (
    CheckpointError,
    LoadedModel,
    ModelConfigError,
    describe_model,
    load_model,
)
from inference_service.models.registry import FAMILIES, declare_model
from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.experts.expert_linear import ExpertWeight, expert_linear
from tests.support.fixtures import FIXTURES
from tests.support.fp8_checkpoint import E4M3, FORMS, quantized_matrix, quantized_rows
from tests.support.runner import GREEDY, DrivenRequest, drive, make_backend

MODELS = sorted(path.name for path in (FIXTURES / "models").iterdir() if not path.name.startswith("gpt_oss"))
PLAIN = ("embed_tokens", "lm_head", "norm", "router", ".gate.", "shared_expert_gate")


def rounded(
    weight: torch.Tensor, form: str, *, is_transposed: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scales as they are stored, and scales spread over the elements."""
    wide = weight.float()
    if wide.dim() == 2:
        return quantized_matrix(wide, form)
    if form == "channel":
        scales = wide.abs().amax(dim=-2 if is_transposed else -1, keepdim=True) / 448
    else:
        assert form == "tensor" or max(wide.shape[-2:]) <= 128  # then a block holds all of a matrix
        scales = wide.abs().amax(dim=(-1, -2), keepdim=True) / 448
    return (wide / scales).to(E4M3), scales.flatten() if form == "tensor" else scales, scales


def write(model: str, path: Path, form: str, *, is_plain: bool = False) -> Path:
    """A fixture's directory in FP8, or in float32 with the same weights."""
    shutil.copytree(FIXTURES / "models" / model, path)
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    suffix = "_scale_inv" if form == "block" else "_scale"
    for name, weight in list(tensors.items()):
        if weight.dim() < 2 or any(part in name for part in PLAIN):
            continue
        is_transposed = weight.dim() == 3 and model == "llama4"
        values, scales, factors = rounded(weight, form, is_transposed=is_transposed)
        if is_plain:
            tensors[name] = values.float() * factors.float()
            continue
        if form == "block" and weight.dim() == 3 and name.endswith(("gate_up_proj", "input_linear.weight")):
            halves = (1, 1, 2) if model == "llama4" else (1, 2, 1)  # gate's block and up's
            scales = scales.repeat(halves)
        tensors |= {name: values, f"{name}{suffix}": scales}
    save_file(tensors, path / "model.safetensors")
    if not is_plain:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": FORMS[form]}))
    return path


class RoundedInput(Linear):
    """A plain projection that rounds its input as a quantised one would."""

    form = ""

    def __call__(self, x: torch.Tensor, lora: LoraBatch) -> torch.Tensor:
        """As of Linear."""
        return super().__call__(quantized_rows(x.double(), self.form).float(), lora)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[LoadedModel]:
    """The models that backends load."""
    models: list[LoadedModel] = []

    def load(*arguments: Any, **settings: Any) -> LoadedModel:
        models.append(load_model(*arguments, **settings))
        return models[-1]

    monkeypatch.setattr(backend_module, "load_model", load)
    return models


def logprobs(backend: DeviceBackend, vocabulary: int) -> torch.Tensor:
    """Of the whole vocabulary after a prompt."""
    sampling = replace(GREEDY, logprobs=vocabulary)
    [driven] = drive(backend, [DrivenRequest([5, 9, 200, 31, 77, 8], sampling=sampling)], num_tokens=1)
    entry = driven.logprobs[0]
    found = torch.full((vocabulary,), float("nan"))
    found[torch.tensor(entry.top_ids)] = torch.tensor(entry.top_logprobs)
    return found


@pytest.mark.parametrize("form", ["channel", "block", "tensor"])
@pytest.mark.parametrize("model", MODELS)
def test_answers_are_those_of_the_same_weights(
    model: str, form: str, tmp_path: Path, loaded: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the plain model of the dequantised weights, its projections' inputs rounded by the test."""
    vocabulary = describe_model(FIXTURES / "models" / model).spec.vocab_size
    served = make_backend(model_dir=str(write(model, tmp_path / "fp8", form)), max_context_tokens=64)
    got = logprobs(served, vocabulary)
    plain = make_backend(
        model_dir=str(write(model, tmp_path / "plain", form, is_plain=True)), max_context_tokens=64
    )
    count = 0
    for quantised, linear in zip(linears(loaded[0].decoder), linears(loaded[1].decoder), strict=True):
        if isinstance(quantised.weight, Fp8Weight):
            linear.__class__ = RoundedInput
            linear.form = form
            count += 1
    assert count >= 4

    def rounding(x: torch.Tensor, weight: ExpertWeight, *arguments: Any, **settings: Any) -> torch.Tensor:
        rows = quantized_rows(x.double(), form).float()
        return expert_linear(rows, weight, *arguments, **settings)

    monkeypatch.setattr(moe_module, "expert_linear", rounding)
    assert torch.allclose(got, logprobs(plain, vocabulary), atol=2e-4)


@pytest.mark.parametrize("model", [*MODELS, "gpt_oss"])
def test_every_family_can_be_quantised_at_load(model: str, loaded: list[LoadedModel]) -> None:
    """All but embedding, head, routers and latents' way up; the answers are numbers."""
    path = FIXTURES / "models" / model
    backend = make_backend(model_dir=str(path), max_context_tokens=64, quantization="fp8")
    assert logprobs(backend, describe_model(path).spec.vocab_size).isfinite().all()
    assert sum(isinstance(linear.weight, Fp8Weight) for linear in linears(loaded[0].decoder)) >= 4


def test_the_latent_is_projected_up_by_plain_weights(tmp_path: Path) -> None:
    """DeepSeek's kv_b is dequantised, its other projections are not."""
    model = load_model(
        describe_model(write("deepseek_v3", tmp_path / "model", "block")),
        dtype=torch.float32, device=torch.device("cpu"), num_positions=16,
    )  # fmt: skip
    for layer in model.decoder.layers:
        attention = layer.attention
        assert isinstance(attention, LatentAttention)
        assert isinstance(attention.kv_up.weight, torch.Tensor)
        assert isinstance(attention.down.weight, Fp8Weight)
        assert isinstance(attention.o.weight, Fp8Weight)


def test_a_fused_tensor_without_scales_is_named(tmp_path: Path) -> None:
    """Which of Llama 4's layouts it is follows from the tensors that are there."""
    path = write("llama4", tmp_path / "model", "channel")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.feed_forward.experts.down_proj_scale"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: .*layers.1.feed_forward.experts.down_proj_scale"):
        load_model(describe_model(path), dtype=torch.float32, device=torch.device("cpu"), num_positions=16)


def test_every_family_but_gpt_oss_reads_it() -> None:
    """Whose experts are MXFP4."""
    refusing: list[str] = []
    for family in FAMILIES:
        if "fp8" not in family.quantizations:
            refusing += family.architectures
    assert refusing == ["GptOssForCausalLM"]
    config: dict[str, Any] = json.loads((FIXTURES / "models/gpt_oss_mxfp4/config.json").read_text())
    from_config = type(describe_model(FIXTURES / "models/gpt_oss_mxfp4").config)
    with pytest.raises(ModelConfigError, match="such weights are served as they are stored"):
        declare_model(from_config("config.json", config), "fp8")
