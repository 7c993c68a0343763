"""FP8 checkpoints in every form: read, held, counted, computed with, and what is refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inference_service.models import (
    CheckpointError,
    LoadedModel,
    ModelConfigError,
    describe_model,
    load_model,
    parameter_bytes,
)
from lorikeet_kernels.dense.fp8_weight import dequantize_fp8
from tests.support.fp8_answers import held
from tests.support.fp8_checkpoint import (
    FORMS,
    Fp8Checkpoint,
    is_projection,
    quantize,
    quantized_rows,
    write_fp8,
)
from tests.support.qwen3_moe_reference import logits
from tests.support.runner import GREEDY, DrivenRequest, drive, make_backend
from tests.support.tiny_model import CONFIG, make_weights, write_model

WIDE = CONFIG | {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64, "num_hidden_layers": 1}
SHARING = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
TOKENS = [3, 17, 5, 29, 8, 11]


def load(path: Path, quantization: str | None = None, **settings: Any) -> LoadedModel:
    """In float32 on the CPU."""
    description = describe_model(path, quantization)
    return load_model(
        description, dtype=torch.float32, device=torch.device("cpu"), num_positions=64, **settings
    )


def checkpoint(path: Path, form: str, config: dict[str, Any] = CONFIG, **changes: Any) -> Fp8Checkpoint:
    """A random one, written."""
    made = quantize(make_weights(config), form)
    write_fp8(path, made, config, form, **changes)
    return made


@pytest.mark.parametrize("config", [CONFIG, WIDE])
@pytest.mark.parametrize("form", list(FORMS))
def test_weights_are_the_checkpoints(tmp_path: Path, form: str, config: dict[str, Any]) -> None:
    """Bit for bit, each module with scales of its own, fused or not."""
    exact = checkpoint(tmp_path, form, config).exact
    weights = held(load(tmp_path))
    p = "model.layers.0"
    experts = range(config["num_experts"])
    expected = {
        "qkv": torch.cat([exact[f"{p}.self_attn.{n}_proj"] for n in "qkv"]),
        "o": exact[f"{p}.self_attn.o_proj"],
        "gate_up": torch.stack(
            [torch.cat([exact[f"{p}.mlp.experts.{e}.{n}_proj"] for n in ("gate", "up")]) for e in experts]
        ),
        "down": torch.stack([exact[f"{p}.mlp.experts.{e}.down_proj"] for e in experts]),
    }
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert torch.equal(dequantize_fp8(weight, torch.float64), expected[name])
        assert weight.kind == ("block" if form == "block" else "channel")


@pytest.mark.parametrize("config", [CONFIG, WIDE])
@pytest.mark.parametrize("form", list(FORMS))
def test_served_logprobs_are_those_of_float64(tmp_path: Path, form: str, config: dict[str, Any]) -> None:
    """A prompt and greedy tokens after it, with every projection's input quantised as the form asks."""
    made = checkpoint(tmp_path, form, config)

    def input_scale(path: str) -> float | None:
        """The widest of those that share an input: q, k and v; gate and up of all experts; all downs."""
        if not made.input_scales:
            return None
        layer = ".".join(path.split(".")[:3])
        ends = next(ends for ends in SHARING if path.endswith(ends))
        found = made.input_scales.items()
        return max(scale for name, scale in found if name.startswith(f"{layer}.") and name.endswith(ends))

    def project(path: str, x: torch.Tensor) -> torch.Tensor:
        if is_projection(f"{path}.weight"):
            x = quantized_rows(x, form, input_scale(path))
        return x @ made.exact[path].T

    backend = make_backend(model_dir=str(tmp_path), max_context_tokens=64)
    vocabulary = config["vocab_size"]
    sampling = replace(GREEDY, logprobs=vocabulary)
    [driven] = drive(backend, [DrivenRequest(TOKENS, sampling=sampling)], num_tokens=4)
    sequence = [*TOKENS, *driven.token_ids]
    reference = torch.log_softmax(logits(config, made.exact, project, sequence), dim=-1)
    for step, entry in enumerate(driven.logprobs):
        expected = reference[len(TOKENS) - 1 + step]
        assert driven.token_ids[step] == int(expected.argmax())
        got = torch.full((vocabulary,), float("nan"), dtype=torch.float64)
        got[torch.tensor(entry.top_ids)] = torch.tensor(entry.top_logprobs, dtype=torch.float64)
        assert torch.allclose(got, expected, atol=2e-4)


def test_static_scales_are_the_widest_of_those_that_share_an_input(tmp_path: Path) -> None:
    """One for q, k and v; one for gate and up of all experts."""
    inputs = checkpoint(tmp_path, "static").input_scales
    weights = held(load(tmp_path))
    for name, part in (("qkv", "self_attn.{}_proj"), ("gate_up", "mlp.experts.{}_proj")):
        scale = weights[name].activations.scale
        assert scale is not None
        ends = ("q_proj", "k_proj", "v_proj") if name == "qkv" else ("gate_proj", "up_proj")
        room = part.split("{", maxsplit=1)[0]
        wanted = max(
            v for k, v in inputs.items() if k.startswith(f"model.layers.0.{room}") and k.endswith(ends)
        )
        assert scale.item() == np.float32(wanted)


@pytest.mark.parametrize(
    ("form", "field"),
    [("block", "modules_to_not_convert"), ("channel", "ignore"), ("bounded", "modules_to_not_convert")],
)
def test_modules_that_are_not_converted_stay_as_they_are(tmp_path: Path, form: str, field: str) -> None:
    """By whole name, by the beginning of one, and by a pattern where the tool writes such."""
    kept = ("model.layers.0.self_attn", "model.layers.1.mlp.experts")
    names = ["lm_head", "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.experts"]
    names += (
        ["re:.*layers.0.self_attn.[qkv]_proj"]
        if form == "channel"
        else [f"{kept[0]}.{n}_proj" for n in "qkv"]
    )
    made = quantize(make_weights(CONFIG), form, kept)
    model = load(write_fp8(tmp_path, made, CONFIG, form, **{field: names}))
    assert held(model, 0).keys() == {"gate_up", "down"}
    assert held(model, 1).keys() == {"qkv", "o"}


@pytest.mark.parametrize("form", list(FORMS))
def test_memory_is_counted_before_loading(tmp_path: Path, form: str) -> None:
    """A byte a value and four a scale as held, which for one scale a module is one a row."""
    made = checkpoint(tmp_path, form, WIDE)
    wanted = 0
    for name, tensor in made.tensors.items():
        if "norm" in name or "_scale" in name:
            continue
        wanted += tensor.numel() * (1 if tensor.dtype == torch.float8_e4m3fn else 2)
        if tensor.dtype == torch.float8_e4m3fn:
            rows, columns = tensor.shape
            wanted += 4 * (-(-rows // 128) * -(-columns // 128) if form == "block" else rows)
    assert parameter_bytes(describe_model(tmp_path).spec, torch.bfloat16) == wanted


@pytest.mark.parametrize("form", list(FORMS))
def test_dummy_weights_are_as_loaded_ones(tmp_path: Path, form: str) -> None:
    """Without files, of about the size of a checkpoint's, and harmless in a forward pass."""
    checkpoint(tmp_path, form)
    loaded = held(load(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    for name, weight in held(load(tmp_path, load_format="dummy")).items():
        assert (weight.kind, weight.shape) == (loaded[name].kind, loaded[name].shape)
        size = dequantize_fp8(weight, torch.float32).std() * weight.shape[-1] ** 0.5
        assert 0.05 < size < 2.0
    backend = make_backend(model_dir=str(tmp_path), load_format="dummy", max_context_tokens=64)
    sampling = replace(GREEDY, logprobs=CONFIG["vocab_size"])
    [driven] = drive(backend, [DrivenRequest([1, 2, 3], sampling=sampling)], num_tokens=2)
    assert all(np.isfinite(entry.top_logprobs).all() for entry in driven.logprobs)


def test_plain_checkpoints_are_quantised_at_load_where_asked(tmp_path: Path) -> None:
    """A scale a row; values are the nearest; memory is counted so; embedding, head and router stay."""
    weights = make_weights(CONFIG)
    path = write_model(tmp_path, weights)
    model = load(path, "fp8")
    for name, weight in held(model).items():
        assert weight.kind == "channel"
        assert weight.activations.kind == "token"
        del name
    assert held(model).keys() == {"qkv", "o", "gate_up", "down"}
    gate = torch.from_numpy(weights["model.layers.0.mlp.experts.2.gate_proj.weight"])
    scales = gate.abs().amax(dim=1) / 448
    got = held(model)["gate_up"].expert(2)
    assert torch.equal(got.scales[: len(gate)], scales)
    assert torch.equal(
        got.values[: len(gate)].float(), (gate / scales[:, None]).to(torch.float8_e4m3fn).float()
    )
    plain, quantised = (parameter_bytes(describe_model(path, q).spec, torch.bfloat16) for q in (None, "fp8"))
    assert quantised < plain
    backend = make_backend(model_dir=str(path), quantization="fp8", max_context_tokens=64)
    [driven] = drive(backend, [DrivenRequest(TOKENS)], num_tokens=3)
    assert len(driven.token_ids) == 3


def test_a_quantised_checkpoint_needs_no_asking(tmp_path: Path) -> None:
    """Asked for FP8, one that is stored so is served as it is stored."""
    checkpoint(tmp_path, "block")
    assert describe_model(tmp_path, "fp8").spec == describe_model(tmp_path).spec


COMPRESSED = FORMS["channel"]["config_groups"]["group_0"]


def group(**changes: Any) -> dict[str, Any]:
    """The config_groups of a changed group."""
    return {"config_groups": {"group_0": COMPRESSED | changes}}


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("block", {"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]; expected \[128, 128\]"),
        ("block", {"activation_scheme": "static"}, "activation_scheme is 'static'; expected 'dynamic'"),
        ("block", {"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ("tensor", {"activation_scheme": "none"}, "activation_scheme is 'none'"),
        ("bounded", {"activation_scale_ub": -1}, "activation_scale_ub is -1; expected a positive number"),
        ("channel", {"format": "pack-quantized"}, "format is 'pack-quantized'"),
        ("channel", {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "num_bits is 4"),
        ("channel", {"config_groups": {}}, "config_groups is {}; expected one group"),
        ("channel", group(targets=["re:.*q_proj"]), "targets is"),
        ("channel", group(weights={"num_bits": 4, "type": "int"}), "num_bits is 4"),
        ("channel", group(input_activations=None), "weights alone in FP8 are not supported"),
        ("channel", {"ignore": ["re:("]}, "no regular expression"),
        (
            "block",
            {"modules_to_not_convert": ["model.layers.0.self_attn.q_proj"]},
            "q_proj is not converted and model.layers.0.self_attn.k_proj is",
        ),
        (
            "block",
            {"modules_to_not_convert": ["model.layers.1.mlp.experts.3"]},
            "experts.3.gate_proj is not converted and model.layers.1.mlp.experts.0.gate_proj is",
        ),
        ("block", {"quant_method": "awq"}, r"'awq', .* \(supported: fp8, compressed-tensors, fbgemm_fp8\)"),
    ],
)
def test_refused_by_name(tmp_path: Path, form: str, changes: dict[str, Any], message: str) -> None:
    """The message names field and value."""
    checkpoint(tmp_path, form, **changes)
    with pytest.raises(ModelConfigError, match=message):
        describe_model(tmp_path)


def test_only_what_exists_can_be_asked_for(tmp_path: Path) -> None:
    """Another quantization than FP8."""
    with pytest.raises(ModelConfigError, match="quantization 'int4' is not supported; supported are fp8"):
        describe_model(write_model(tmp_path), "int4")


def test_every_misfit_is_named(tmp_path: Path) -> None:
    """A scale that is missing, values that are no e4m3, a NaN among them, a scale of another form."""
    p = "model.layers.0.self_attn"
    for change, message in (
        ({f"{p}.o_proj.weight_scale": None}, rf"1 missing: {p}.o_proj.weight_scale"),
        (
            {f"{p}.o_proj.weight": torch.zeros(32, 64)},
            r"of another dtype: .*o_proj.weight is F32, .* F8_E4M3",
        ),
        ({f"{p}.o_proj.weight_scale": torch.zeros(5, 1)}, r"misshaped: .*o_proj.weight_scale is \[5, 1\]"),
        ({f"{p}.o_proj.weight_scale": torch.full((32, 1), float("inf"))}, "with infinities or NaNs"),
        (
            {f"{p}.o_proj.weight": torch.full((32, 64), 255, dtype=torch.uint8).view(torch.float8_e4m3fn)},
            r"with infinities or NaNs: .*o_proj.weight \(F8_E4M3\)",
        ),
    ):
        made = quantize(make_weights(CONFIG), "bounded")
        for name, tensor in change.items():
            if tensor is None:
                del made.tensors[name]
            else:
                made.tensors[name] = tensor
        with pytest.raises(CheckpointError, match=message):
            load(write_fp8(tmp_path, made, CONFIG, "bounded"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.0, r"layers.0.self_attn.o_proj.input_scale is 0; .* above 0"),
        (-0.01, r"layers.0.self_attn.o_proj.input_scale is -0.01; .* above 0"),
        (float("nan"), r"with infinities or NaNs: .*o_proj.input_scale"),
    ],
)
def test_a_static_scale_is_above_0(tmp_path: Path, value: float, message: str) -> None:
    """Rows divided by 0 would saturate, and be multiplied by it again: a layer without attention."""
    made = quantize(make_weights(CONFIG), "static")
    made.tensors["model.layers.0.self_attn.o_proj.input_scale"] = torch.tensor([value])
    with pytest.raises(CheckpointError, match=message):
        load(write_fp8(tmp_path, made, CONFIG, "static"))


def test_scales_of_rows_are_not_a_matrix_scale(tmp_path: Path) -> None:
    """A config that says "tensor" over a file with a scale for each row: every shape is named."""
    made = quantize(make_weights(CONFIG), "channel")
    weights = COMPRESSED["weights"] | {"strategy": "tensor"}
    with pytest.raises(CheckpointError, match=r"misshaped: .*q_proj.weight_scale is \[\d+, 1\]"):
        load(write_fp8(tmp_path, made, CONFIG, "channel", **group(weights=weights)))


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.tensor(-2.0), r"k_scale holds a scale that is not above 0, or not a number: -2"),
        (torch.ones(1, dtype=torch.int64), r"of another dtype: .*k_scale is I64"),
    ],
)
def test_a_scale_of_keys_is_above_0_and_a_float(tmp_path: Path, scale: torch.Tensor, message: str) -> None:
    """Each fault by its own name."""
    made = quantize(make_weights(CONFIG), "block")
    made.tensors["model.layers.0.self_attn.k_scale"] = scale
    with pytest.raises(CheckpointError, match=message):
        load(write_fp8(tmp_path, made, CONFIG, "block"))
