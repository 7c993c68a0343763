"""GPT-OSS directories: what is read from them, plain and packed, and what is refused by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inference_service.layers.moe import Moe
from inference_service.models import (
    CheckpointError,
    LoadedModel,
    ModelConfigError,
    describe_model,
    load_model,
    parameter_bytes,
)
from lorikeet_contract.schema import SiteKind
from lorikeet_kernels.experts.mxfp4 import Mxfp4Weight
from tests.support.fixtures import FIXTURES
from tests.support.lora_schemas import SCHEMAS
from tests.support.runner import GREEDY, DrivenRequest, drive, make_backend
from tests.support.tiny_gpt_oss import (
    CONFIG,
    QUANTIZATION,
    Weights,
    make_weights,
    pack_experts,
    write_gpt_oss,
)

EXPERTS = "model.layers.1.mlp.experts"
PACKED = {"intermediate_size": 64, "quantization_config": QUANTIZATION}


def load(path: Path, dtype: torch.dtype = torch.float32, load_format: str = "auto") -> LoadedModel:
    """On the CPU."""
    return load_model(
        describe_model(path),
        dtype=dtype,
        device=torch.device("cpu"),
        num_positions=64,
        load_format=load_format,
    )


def moe_of(model: LoadedModel, layer: int = 1) -> Moe:
    """A layer's mixture of experts."""
    mlp = model.decoder.layers[layer].mlp
    assert isinstance(mlp, Moe)
    return mlp


def packed_weights() -> Weights:
    """A checkpoint with MXFP4 experts."""
    return pack_experts(make_weights(CONFIG | PACKED))


def test_fused_experts_are_turned_and_keep_their_row_order(tmp_path: Path) -> None:
    """Stored [E, in, out] with columns g0, u0, g1, ...; held [E, out, in] with rows in the same order."""
    weights = make_weights()
    moe = moe_of(load(write_gpt_oss(tmp_path, weights)))
    for held, name in ((moe.experts.gate_up, "gate_up_proj"), (moe.experts.down, "down_proj")):
        assert isinstance(held.weight, torch.Tensor)
        assert held.bias is not None
        np.testing.assert_array_equal(held.weight, weights[f"{EXPERTS}.{name}"].transpose(0, 2, 1))
        np.testing.assert_array_equal(held.bias, weights[f"{EXPERTS}.{name}_bias"])
    assert moe.experts.row_order == "interleaved"
    assert moe.router.bias is not None
    np.testing.assert_array_equal(moe.router.bias, weights["model.layers.1.mlp.router.bias"])


def test_attention_has_sinks_biases_and_a_window_where_listed(tmp_path: Path) -> None:
    """The first layer slides, the second does not; every projection has its bias."""
    weights = make_weights()
    layers = load(write_gpt_oss(tmp_path, weights)).decoder.layers
    assert [layer.attention.shape.window for layer in layers] == [8, None]
    for index, layer in enumerate(layers):
        prefix = f"model.layers.{index}.self_attn"
        assert layer.attention.sinks is not None
        assert layer.attention.qkv.bias is not None
        assert layer.attention.o.bias is not None
        np.testing.assert_array_equal(layer.attention.sinks, weights[f"{prefix}.sinks"])
        np.testing.assert_array_equal(layer.attention.o.bias, weights[f"{prefix}.o_proj.bias"])
        np.testing.assert_array_equal(
            layer.attention.qkv.bias, np.concatenate([weights[f"{prefix}.{n}_proj.bias"] for n in "qkv"])
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_stay_packed(tmp_path: Path, dtype: torch.dtype) -> None:
    """Blocks and scales are held byte for byte, whatever the compute dtype; biases are in that dtype."""
    weights = packed_weights()
    experts = moe_of(load(write_gpt_oss(tmp_path, weights, **PACKED), dtype)).experts
    for held, name in ((experts.gate_up, "gate_up_proj"), (experts.down, "down_proj")):
        assert isinstance(held.weight, Mxfp4Weight)
        assert held.bias is not None
        np.testing.assert_array_equal(held.weight.blocks, weights[f"{EXPERTS}.{name}_blocks"])
        np.testing.assert_array_equal(held.weight.scales, weights[f"{EXPERTS}.{name}_scales"])
        assert held.bias.dtype == dtype


def test_the_released_quantization_is_the_plain_twin() -> None:
    """The fixture's packed experts unpack to the plain fixture's, so that goldens and adapters are shared."""
    plain, packed = (load(FIXTURES / "models" / name) for name in ("gpt_oss", "gpt_oss_mxfp4"))
    one, other = (model.schema for model in (plain, packed))
    assert one == other
    assert plain.base_digest != packed.base_digest


@pytest.mark.parametrize("model", ["gpt_oss", "gpt_oss_mxfp4"])
def test_schema_is_what_adapters_are_written_for(model: str) -> None:
    """Sites, sizes, orders and module names equal those written by hand from the released layout."""
    wanted = {site.name: site for site in SCHEMAS["gpt_oss"]().sites}
    for site in load(FIXTURES / "models" / model).schema.sites:
        by_hand = wanted.pop(site.name)
        # The declaration takes more names (w1, w3, w2); those written by hand must be among them.
        for ours, theirs in zip(site.slices, by_hand.slices, strict=True):
            assert set(theirs.modules) <= set(ours.modules)
        # Plain modules may be named by their parameter, too; the list by hand does not say so.
        parameter = site.fused_parameter if site.kind is SiteKind.EXPERTS else ""
        assert replace(site, slices=by_hand.slices, fused_parameter=parameter) == by_hand
    assert not wanted


Change = Callable[[Weights], object]


@pytest.mark.parametrize(
    ("is_packed", "change", "message"),
    [
        (True, lambda w: w.pop(f"{EXPERTS}.down_proj_scales"), rf"1 missing: {EXPERTS}.down_proj_scales"),
        (
            True,
            lambda w: w.pop(f"{EXPERTS}.gate_up_proj_blocks"),
            rf"1 missing: {EXPERTS}.gate_up_proj_blocks",
        ),
        (
            False,
            lambda w: w.pop("model.layers.0.self_attn.sinks"),
            r"1 missing: model.layers.0.self_attn.sinks",
        ),
        (
            False,
            lambda w: w.update(
                {f"{EXPERTS}.gate_up_proj": w[f"{EXPERTS}.gate_up_proj"].transpose(0, 2, 1).copy()}
            ),
            rf"{EXPERTS}.gate_up_proj is \[4, 48, 32\], config.json makes it \[4, 32, 48\]",
        ),
        (
            True,
            lambda w: w.update(
                {f"{EXPERTS}.down_proj_scales": w[f"{EXPERTS}.down_proj_scales"][:, :, :1].copy()}
            ),
            rf"{EXPERTS}.down_proj_scales is \[4, 32, 1\], config.json makes it \[4, 32, 2\]",
        ),
        (
            True,
            lambda w: w.update(
                {f"{EXPERTS}.down_proj_blocks": w[f"{EXPERTS}.down_proj_blocks"].astype(np.float32)}
            ),
            rf"{EXPERTS}.down_proj_blocks is F32, this model's are U8",
        ),
        (
            False,
            lambda w: w.update({f"{EXPERTS}.down_proj": w[f"{EXPERTS}.down_proj"].astype(np.uint8)}),
            rf"{EXPERTS}.down_proj is U8, this model's are BF16, F16, F32, F64",
        ),
        (
            True,
            lambda w: w[f"{EXPERTS}.gate_up_proj_scales"].__setitem__((2, 3, 0), 255),
            rf"{EXPERTS}.gate_up_proj_scales holds the scale 255, which is not a number",
        ),
        (
            True,
            lambda w: w[f"{EXPERTS}.down_proj_scales"].__setitem__((0, 1, 0), 253),
            rf"{EXPERTS}.down_proj_scales holds the scale 253, which takes values beyond float32's range",
        ),
        (
            True,
            lambda w: w[f"{EXPERTS}.down_proj_bias"].__setitem__((0, 1), np.inf),
            rf"1 with infinities or NaNs: {EXPERTS}.down_proj_bias \(F32\)",
        ),
        (
            False,
            lambda w: w["model.layers.0.self_attn.sinks"].__setitem__(1, np.nan),
            r"1 with infinities or NaNs: model.layers.0.self_attn.sinks \(F32\)",
        ),
        (
            True,
            lambda w: w.update({f"{EXPERTS}.gate_up_proj": np.zeros(3, np.float32)}),
            rf"1 unexpected: {EXPERTS}.gate_up_proj",
        ),
    ],
)
def test_every_misfit_is_named(tmp_path: Path, is_packed: bool, change: Change, message: str) -> None:
    """Tensor and reason, for what a checkpoint lacks, has in another shape or dtype, or has too much."""
    weights = packed_weights() if is_packed else make_weights()
    change(weights)
    fields = PACKED if is_packed else {}
    with pytest.raises(CheckpointError, match=message):
        load(write_gpt_oss(tmp_path, weights, **fields))


def test_a_packed_checkpoint_without_its_declaration_is_named(tmp_path: Path) -> None:
    """Without quantization_config the plain tensors are missing and the packed ones left over, by name."""
    path = write_gpt_oss(tmp_path, packed_weights(), intermediate_size=64)
    with pytest.raises(CheckpointError, match=r"missing: .*gate_up_proj; .* unexpected: .*down_proj_blocks"):
        load(path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_beyond_the_compute_dtype_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """1e5 is beyond float16's range and within bfloat16's."""
    weights = make_weights()
    weights[f"{EXPERTS}.down_proj"][1, 2, 3] = 1e5
    path = write_gpt_oss(tmp_path, weights)
    if dtype == torch.bfloat16:
        load(path, dtype)
        return
    with pytest.raises(CheckpointError, match=rf"1 too large: {EXPERTS}.down_proj \(F32\) has values beyond"):
        load(path, dtype)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": None}, "rope_scaling is missing"),
        ({"layer_types": ["full_attention"]}, "layer_types is .* expected 2 of 'sliding_attention'"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types is"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5; expected at most num_local_experts, 4"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"'fp8', .* \(supported: mxfp4\)"),
        ({"quantization_config": QUANTIZATION}, "intermediate_size is 24; expected a multiple of 32"),
        (
            PACKED
            | {"quantization_config": {**QUANTIZATION, "modules_to_not_convert": ["layers.0.mlp.experts"]}},
            "modules_to_not_convert is .* in MXFP4 or of none",
        ),
        (
            PACKED | {"quantization_config": {**QUANTIZATION, "modules_to_not_convert": 5}},
            "modules_to_not_convert is 5; expected a list of strings",
        ),
        ({"layer_types": 5}, "layer_types is 5; expected a list of strings"),
    ],
)
def test_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    """The message names field, value and what would do."""
    with pytest.raises(ModelConfigError, match=message):
        describe_model(write_gpt_oss(tmp_path, {"x": np.zeros(1, np.float32)}, **fields))


def test_layers_alternate_where_the_config_does_not_say(tmp_path: Path) -> None:
    """As released: a window first."""
    spec = describe_model(write_gpt_oss(tmp_path, layer_types=None, num_hidden_layers=3)).spec
    assert [layer.attention.window for layer in spec.layers] == [8, None, 8]


@pytest.mark.parametrize("is_packed", [False, True])
def test_memory_is_counted_before_loading(tmp_path: Path, is_packed: bool) -> None:
    """Every tensor but norms and sinks: two bytes an element in bfloat16, packed ones as they are."""
    weights = packed_weights() if is_packed else make_weights()
    wanted = sum(
        w.nbytes if w.dtype == np.uint8 else 2 * w.size
        for name, w in weights.items()
        if "norm" not in name and "sinks" not in name
    )
    fields = PACKED if is_packed else {}
    spec = describe_model(write_gpt_oss(tmp_path, weights, **fields)).spec
    assert parameter_bytes(spec, torch.bfloat16) == wanted


@pytest.mark.parametrize("is_packed", [False, True])
def test_dummy_weights_are_small_numbers(tmp_path: Path, is_packed: bool) -> None:
    """Without files, in the same form as loaded ones, and harmless in a forward pass."""
    path = write_gpt_oss(tmp_path, **(PACKED if is_packed else {}))
    (path / "model.safetensors").unlink()
    experts = moe_of(load(path, load_format="dummy")).experts
    assert isinstance(experts.down.weight, Mxfp4Weight) == is_packed
    backend = make_backend(model_dir=str(path), load_format="dummy", max_context_tokens=64)
    [driven] = drive(backend, [DrivenRequest([1, 2, 3], sampling=replace(GREEDY, logprobs=48))], num_tokens=2)
    assert all(np.isfinite(entry.top_logprobs).all() for entry in driven.logprobs)
