"""What each family declares, held against its checkpoint, its other config style and hand-written schemas."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference_service.layers.rope import rope_table
from inference_service.models import (
    CheckpointError,
    ModelConfigError,
    describe_model,
    load_model,
    parameter_bytes,
)
from inference_service.models.attention_spec import (
    AttentionSpec,
    LatentAttentionSpec,
    QueryTemperatureSpec,
    UnitNormSpec,
)
from inference_service.models.config import ConfigReader
from inference_service.models.lora_sites import lora_schema
from inference_service.models.registry import FAMILIES, declare_model
from inference_service.models.spec import DenseMlpSpec, GroupedSoftmaxRouting, ModelSpec, MoeSpec
from lorikeet_contract.schema import LoraSite
from tests.support.fixtures import FIXTURES
from tests.support.lora_schemas import SCHEMAS

MODELS = sorted(path.name for path in (FIXTURES / "models").iterdir())
CPU = torch.device("cpu")


def config_of(model: str, **fields: object) -> dict[str, Any]:
    """A fixture's config.json; None removes a field."""
    config = json.loads((FIXTURES / "models" / model / "config.json").read_text()) | fields
    return {name: value for name, value in config.items() if value is not None}


def declared(model: str, **fields: object) -> ModelSpec:
    """What its family makes of a fixture's config."""
    return declare_model(ConfigReader("config.json", config_of(model, **fields)))[1]


def attention_of(spec: ModelSpec) -> list[AttentionSpec]:
    """Every layer's, none of them latent."""
    return [layer.attention for layer in spec.layers if isinstance(layer.attention, AttentionSpec)]


def copy_of(model: str, path: Path, **fields: object) -> Path:
    """A fixture's directory that a test may write to."""
    shutil.copytree(FIXTURES / "models" / model, path)
    (path / "config.json").write_text(json.dumps(config_of(model, **fields)))
    return path


def test_every_fixture_is_of_a_family() -> None:
    """And every family has a fixture."""
    served = {declare_model(ConfigReader("", config_of(model)))[0] for model in MODELS}
    assert served == {family.architectures[0] for family in FAMILIES}


@pytest.mark.parametrize("model", MODELS)
def test_config_of_transformers_5_means_the_same(model: str) -> None:
    """Rotary fields in `rope_parameters`, `dtype`, and one name for the number of experts."""
    old = config_of(model)
    scaling = dict(old.get("rope_scaling") or {"rope_type": "default"})
    scaling.setdefault("rope_type", scaling.pop("type", "default"))
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new |= {"dtype": "bfloat16", "rope_parameters": {**scaling, "rope_theta": old["rope_theta"]}}
    for name in ("num_experts", "n_routed_experts"):
        if name in new:
            new["num_local_experts"] = new.pop(name)
    assert declare_model(ConfigReader("", new))[1] == declare_model(ConfigReader("", old))[1]


@pytest.mark.parametrize("model", MODELS)
def test_planned_bytes_are_the_checkpoints(model: str) -> None:
    """All matrices are counted, of whatever kind; what is left out is norms, biases and sinks."""
    spec, directory = declared(model), FIXTURES / "models" / model
    stored = [tensor for path in directory.glob("*.safetensors") for tensor in load_file(path).values()]
    packed = sum(t.nbytes for t in stored if t.dtype == torch.uint8)
    matrices = sum(t.numel() for t in stored if t.dtype != torch.uint8 and t.ndim > 1)
    biases = sum(t.numel() for t in stored if t.ndim == 1)
    planned = parameter_bytes(spec, torch.float32)
    assert packed + 4 * matrices <= planned <= packed + 4 * (matrices + biases)


def shape_of(site: LoraSite) -> tuple[object, ...]:
    """All that payloads and kernels go by."""
    slices = tuple((piece.name, piece.out_features) for piece in site.slices)
    sizes = (site.in_features, site.out_features, site.num_experts)
    return (site.kind, *sizes, slices, site.row_order, site.parameter_layout)


@pytest.mark.parametrize("model", sorted(SCHEMAS))
def test_declared_sites_are_the_hand_written_ones(model: str) -> None:
    """The manager's tests use schemas written by hand: the same sites, shapes and base weights."""
    spec = declared(model)
    ours = {site.name: site for site in lora_schema(spec, lambda _name: ("", "")).sites}
    theirs = {site.name: site for site in SCHEMAS[model]().sites}
    assert ours.keys() == theirs.keys()
    for name, site in theirs.items():
        assert shape_of(ours[name]) == shape_of(site), name
        for mine, written in zip(ours[name].slices, site.slices, strict=True):
            assert set(written.modules) <= set(mine.modules), name
        if site.num_experts:
            assert ours[name].fused_parameter == site.fused_parameter


@pytest.mark.parametrize("model", MODELS)
def test_site_names_are_unique_and_layers_ascend(model: str) -> None:
    """The order is the tables'; sites outside the layers come last."""
    sites = lora_schema(declared(model), lambda _name: ("", "")).sites
    assert len({site.name for site in sites}) == len(sites)
    layers = [site.layer for site in sites]
    inside = [layer for layer in layers if layer is not None]
    assert inside == sorted(inside)
    assert layers[len(inside) :] == [None, None]


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0; this server supports None"),
        ("llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok is 2; this server supports 1"),
        ("llama4", {"no_rope_layers": [1, 0]}, "no_rope_layers is .* expected 4 of 0 and 1"),
        ("llama4", {"layer_types": ["full_attention"] * 4}, "layer_types is .* this server supports"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; this server supports 1"),
        ("deepseek_v3", {"n_group": None}, "n_group is missing"),
        ("deepseek_v3", {"routed_scaling_factor": None}, "routed_scaling_factor is missing"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("deepseek_v3", {"n_group": 3}, "n_group is 3; expected a divisor of the number of experts, 8"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group is 5; expected at most n_group, 4"),
        (
            "deepseek_v3",
            {"topk_group": 1},
            "num_experts_per_tok is 3; expected at most .* topk_group groups, 2",
        ),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; expected an even number"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias is True"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5; expected at most num_experts, 4"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types is .* expected 3 of"),
        ("granitemoe", {"residual_multiplier": -1}, "residual_multiplier is -1; expected a positive number"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(model: str, fields: dict[str, Any], message: str) -> None:
    """The message names field and value."""
    with pytest.raises(ModelConfigError, match=message):
        declared(model, **fields)


def test_windows_lie_where_each_family_has_them() -> None:
    """Mixtral on all layers, Qwen3 from a layer on, Qwen2-MoE on even ones up to a layer, or as listed."""

    def windows(model: str, **fields: object) -> list[int | None]:
        return [attention.window for attention in attention_of(declared(model, **fields))]

    used = {"use_sliding_window": True, "sliding_window": 9}
    assert windows("mixtral", sliding_window=9) == [9, 9, 9]
    assert windows("qwen3", max_window_layers=1, **used) == [None, 9, 9]
    assert windows("qwen2_moe", max_window_layers=1, num_hidden_layers=3, **used) == [9, None, None]
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert windows("qwen3", layer_types=kinds, **used) == [None, 9, None]
    assert windows("qwen3", layer_types=kinds, sliding_window=9) == [None] * 3


def test_llama4_without_lists() -> None:
    """Every fourth layer does not rotate, and with a step of 2 every second one has experts."""
    spec = declared("llama4", no_rope_layers=None, moe_layers=None, num_hidden_layers=8)
    kinds = [type(layer.mlp) for layer in spec.layers]
    assert kinds == [DenseMlpSpec, MoeSpec] * 4
    for index, attention in enumerate(attention_of(spec)):
        if index % 4 == 3:
            assert attention.temperature == QueryTemperatureSpec(0.1, 16)
            assert (attention.rope, attention.head_norm, attention.chunk) == (None, None, None)
        else:
            assert attention.temperature is None
            assert attention.rope is not None
            assert (attention.is_pairwise, attention.norms_rotated, attention.chunk) == (True, True, 32)
            assert attention.head_norm == UnitNormSpec()
    kinds = ["chunked_attention"] * 3 + ["full_attention"]
    assert declared("llama4", layer_types=kinds) == declared("llama4")
    default = declared("llama4", attention_chunk_size=None)
    assert [attention.chunk for attention in attention_of(default)] == [8192, 8192, 8192, None]
    plain = declared("llama4", use_qk_norm=False, attn_temperature_tuning=False)
    assert [attention.head_norm for attention in attention_of(plain)] == [None] * 4
    assert [attention.temperature for attention in attention_of(plain)] == [None] * 4


def test_llama4_rope_of_one_frequency_factor_is_finite() -> None:
    """Scout's low and high factors are equal: nothing lies between them."""
    rope = config_of("llama4")["rope_scaling"] | {"high_freq_factor": 1.0}
    read = attention_of(declared("llama4", rope_scaling=rope))[0].rope
    assert read is not None
    assert read.high_freq_factor == read.low_freq_factor
    assert rope_table(read, 512, CPU).isfinite().all()


def test_text_model_inside_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """Llama 4 as released: text_config, names behind language_model, and towers that text does not pass."""
    source = FIXTURES / "models" / "llama4"
    weights = {f"language_model.{k}": v for k, v in load_file(source / "model.safetensors").items()}
    weights["vision_model.patch_embedding.linear.weight"] = torch.zeros(4, 4)
    weights["multi_modal_projector.linear_1.weight"] = torch.zeros(4, 4)
    save_file(weights, tmp_path / "model.safetensors")
    outer = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": config_of("llama4"),
        "vision_config": {"hidden_size": 4},
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))

    def load(path: Path) -> Any:
        return load_model(describe_model(path), dtype=torch.float32, device=CPU, num_positions=8)

    plain, inside = load(source), load(tmp_path)
    assert inside.schema == plain.schema
    assert torch.equal(inside.decoder.lm_head.weight, plain.decoder.lm_head.weight)
    experts = inside.decoder.layers[3].mlp.experts.gate_up.weight
    assert torch.equal(experts, plain.decoder.layers[3].mlp.experts.gate_up.weight)


def test_layers_that_guess_ahead_are_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3 checkpoints may hold them behind the last layer, if the config says so."""
    path = copy_of("deepseek_v3", tmp_path / "model", num_nextn_predict_layers=1)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    extra = {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}
    save_file(extra, path / "model-00003-of-00003.safetensors")
    index["weight_map"] |= dict.fromkeys(extra, "model-00003-of-00003.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert describe_model(path).spec.ignored_weights == ("model.layers.3.",)
    load_model(describe_model(path), dtype=torch.float32, device=CPU, num_positions=8)
    (path / "config.json").write_text(json.dumps(config_of("deepseek_v3", num_nextn_predict_layers=0)))
    with pytest.raises(CheckpointError, match=r"1 unexpected: model\.layers\.3\.eh_proj\.weight"):
        load_model(describe_model(path), dtype=torch.float32, device=CPU, num_positions=8)


@pytest.mark.parametrize(
    ("model", "theta", "eps"), [("mixtral", 1e6, 1e-5), ("llama4", 5e5, 1e-5), ("llama", 1e4, 1e-6)]
)
def test_what_a_config_leaves_out_is_the_familys_own(model: str, theta: float, eps: float) -> None:
    """Base of the rotation and epsilon of the norms, as transformers has them."""
    spec = declared(model, rope_theta=None, rms_norm_eps=None)
    attention = attention_of(spec)[0]
    assert attention.rope is not None
    assert (attention.rope.theta, spec.norm_eps) == (theta, eps)


@pytest.mark.parametrize("model", MODELS)
def test_random_weights_need_no_checkpoint(model: str) -> None:
    """For benches of sizes whose files are not at hand."""
    described = describe_model(FIXTURES / "models" / model)
    loaded = load_model(described, dtype=torch.bfloat16, device=CPU, num_positions=8, load_format="dummy")
    assert len(loaded.decoder.layers) == len(described.spec.layers)
    head = loaded.decoder.lm_head.weight
    assert isinstance(head, torch.Tensor)
    assert head.isfinite().all()


def test_deepseek_sizes() -> None:
    """A cached row is 32 + 8 wide for all heads; groups where the method says so."""
    spec = declared("deepseek_v2")
    for layer in spec.layers:
        assert isinstance(layer.attention, LatentAttentionSpec)
        assert layer.attention.cached_elements == 40
    grouped = declared("deepseek_v2", topk_method="group_limited_greedy", n_group=3, topk_group=2)
    mlp = grouped.layers[1].mlp
    assert isinstance(mlp, MoeSpec)
    assert mlp.routing == GroupedSoftmaxRouting(top_k=2, num_groups=3, top_k_groups=2, scale=1.0)
