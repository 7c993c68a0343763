"""Every place of every family that an adapter may target, under the names that trainers write for it.

Names are those of transformers 4.57 and 5.24, and of trainers with their own; deltas are lora_B lora_A in
float64. Layouts of the experts as such are in test_expert_reports.py and test_layout_properties.py, too.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from adapter_manager.domain.errors import InvalidAdapterError
from lorikeet_contract.schema import LoraSchema, LoraSite, ParameterLayout, RowOrder, SiteKind
from tests.support.adapter_directories import PREFIX, config_of, ingest, linear_pair, write_adapter
from tests.support.expert_layouts import Tensors, exchanged, packed, pair
from tests.support.lora_deltas import Deltas
from tests.support.lora_schemas import experts, schema_of

# Module of the file -> the site it means, and which of its slices.
Places = dict[str, tuple[str, str]]


def attention(layer: int, *names: str) -> Places:
    """Projections whose module is called as in PEFT's file."""
    sites = {"kv_a_proj_with_mqa": "kv_a"}
    prefix = f"model.layers.{layer}.self_attn"
    return {
        f"{prefix}.{name}": (f"layers.{layer}.{sites.get(name, name.removesuffix('_proj'))}", "")
        for name in names
    }


def gated(module: str, site: str) -> Places:
    """A dense gate, up and down."""
    down = site.replace("gate_up", "down")
    return {
        f"{module}.gate_proj": (site, "gate"),
        f"{module}.up_proj": (site, "up"),
        f"{module}.down_proj": (down, ""),
    }


QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
MLA = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
ENDS: Places = {"lm_head": ("lm_head", ""), "model.embed_tokens": ("embed", "")}
LAYER = "model.layers.1"
FAMILIES: dict[str, Places] = {
    "qwen3_moe": attention(1, *QKVO) | {f"{LAYER}.mlp.gate": ("layers.1.router", "")} | ENDS,
    "olmoe": attention(1, *QKVO) | {f"{LAYER}.mlp.gate": ("layers.1.router", "")} | ENDS,
    "gpt_oss": attention(1, *QKVO) | {f"{LAYER}.mlp.router": ("layers.1.router", "")} | ENDS,
    "mixtral": attention(1, *QKVO) | {f"{LAYER}.mlp.gate": ("layers.1.router", "")} | ENDS,
    "mixtral of transformers 4": {f"{LAYER}.block_sparse_moe.gate": ("layers.1.router", "")},
    "granitemoe": attention(1, *QKVO) | {f"{LAYER}.block_sparse_moe.router": ("layers.1.router", "")} | ENDS,
    "granitemoe of transformers 4": {f"{LAYER}.block_sparse_moe.router.layer": ("layers.1.router", "")},
    "qwen2_moe": attention(1, *QKVO)
    | {f"{LAYER}.mlp.gate": ("layers.1.router", "")}
    | {f"{LAYER}.mlp.shared_expert_gate": ("layers.1.shared_gate", "")}
    | gated(f"{LAYER}.mlp.shared_expert", "layers.1.shared_gate_up")
    | ENDS,
    "deepseek_v2": attention(1, "q_proj", *MLA)
    | {f"{LAYER}.mlp.gate": ("layers.1.router", "")}
    | gated("model.layers.0.mlp", "layers.0.mlp_gate_up")
    | gated(f"{LAYER}.mlp.shared_experts", "layers.1.shared_gate_up")
    | ENDS,
    "deepseek_v3": attention(1, "q_a_proj", "q_b_proj", *MLA)
    | {f"{LAYER}.mlp.gate": ("layers.1.router", "")}
    | gated("model.layers.0.mlp", "layers.0.mlp_gate_up")
    | gated(f"{LAYER}.mlp.shared_experts", "layers.1.shared_gate_up")
    | ENDS,
    "llama4": attention(1, *QKVO)
    | {f"{LAYER}.feed_forward.router": ("layers.1.router", "")}
    | gated("model.layers.0.feed_forward", "layers.0.mlp_gate_up")
    | gated(f"{LAYER}.feed_forward.shared_expert", "layers.1.shared_gate_up")
    | ENDS,
    "llama": attention(1, *QKVO) | gated(f"{LAYER}.mlp", "layers.1.mlp_gate_up") | ENDS,
    "qwen3": attention(1, *QKVO) | gated(f"{LAYER}.mlp", "layers.1.mlp_gate_up") | ENDS,
}


def site_of(schema: LoraSchema, name: str) -> LoraSite:
    """By its name."""
    return next(site for site in schema.sites if site.name == name)


def width_of(site: LoraSite, slice_name: str) -> int:
    """Rows that a module has."""
    return next((s.out_features for s in site.slices if s.name == slice_name), site.out_features)


def embedding_pair(site: LoraSite, module: str, rank: int) -> Tensors:
    """As PEFT writes it for an embedding: A is [rank, vocabulary], and there is no `.weight`."""
    generator = torch.Generator().manual_seed(7)
    return {
        f"{PREFIX}{module}.lora_embedding_A": torch.randn(rank, site.in_features, generator=generator),
        f"{PREFIX}{module}.lora_embedding_B": torch.randn(site.out_features, rank, generator=generator),
    }


def rows_of(deltas: Deltas, schema: LoraSchema, name: str, slice_name: str) -> np.ndarray:
    """The rows of a site's delta that one of its modules has, concatenated slices as they stand."""
    site = site_of(schema, name)
    assert site.row_order is RowOrder.CONCATENATED
    start = 0
    for piece in site.slices:
        if piece.name == slice_name or not slice_name:
            break
        start += piece.out_features
    return deltas[name, -1][start : start + width_of(site, slice_name)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_place_of_a_family_takes_an_adapter(family: str, tmp_path: Path) -> None:
    """Attention, latent attention, router, dense MLP, shared experts and their gate, embeddings, head."""
    schema = schema_of(family.partition(" ")[0])
    tensors: Tensors = {}
    for seed, (module, (name, slice_name)) in enumerate(FAMILIES[family].items()):
        site = site_of(schema, name)
        if site.kind is SiteKind.EMBEDDING:
            tensors |= embedding_pair(site, module, 3)
        else:
            tensors |= linear_pair(module, site.in_features, width_of(site, slice_name), 3, seed)
    built, deltas = ingest(write_adapter(tmp_path / "a", tensors, config_of(3, 6)), schema, tmp_path)
    assert built.report.tensors_used == len(tensors) == 2 * len(FAMILIES[family])
    for module, (name, slice_name) in FAMILIES[family].items():
        is_embedding = site_of(schema, name).kind is SiteKind.EMBEDDING
        suffixes = ("embedding_A", "embedding_B") if is_embedding else ("A.weight", "B.weight")
        a, b = (tensors[f"{PREFIX}{module}.lora_{suffix}"].double().numpy() for suffix in suffixes)
        found = rows_of(deltas, schema, name, slice_name)
        np.testing.assert_allclose(found, 2.0 * b @ a, rtol=1e-12, atol=1e-13, err_msg=module)


def test_the_catalogue_has_every_site_of_every_family() -> None:
    """A site that a family declares and this file does not name would go untested."""
    for family in {name.partition(" ")[0] for name in FAMILIES}:
        named = {
            name.rpartition(".")[2]
            for key, places in FAMILIES.items()
            if key.partition(" ")[0] == family
            for name, _ in places.values()
        }
        declared = {s.key for s in schema_of(family).sites if s.kind is not SiteKind.EXPERTS}
        assert named == declared, family


def expert_weights(site: LoraSite, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of all experts of a site."""
    generator = torch.Generator().manual_seed(seed)
    shape = (site.num_experts, rank, site.in_features)
    a = torch.randn(shape, generator=generator)
    return a, torch.randn(site.num_experts, site.out_features, rank, generator=generator)


ROOTS = {
    "qwen3_moe": "mlp.experts", "olmoe": "mlp.experts", "qwen2_moe": "mlp.experts", "gpt_oss": "mlp.experts",
    "deepseek_v2": "mlp.experts", "deepseek_v3": "mlp.experts", "llama4": "feed_forward.experts",
    "mixtral": "mlp.experts", "granitemoe": "block_sparse_moe.experts",
}  # fmt: skip


@pytest.mark.parametrize("family", ROOTS)
@pytest.mark.parametrize(
    "form", ["peft-fused", "peft-fused-exchanged", "stacked-3d", "per-expert-fused", "projs"]
)
def test_experts_of_every_family_in_every_whole_form(family: str, form: str, tmp_path: Path) -> None:
    """Both parameters of one layer; rows in the model's own order, so interleaved ones stay so."""
    schema = schema_of(family)
    layer = next(s.layer for s in schema.sites if s.kind is SiteKind.EXPERTS and s.layer)
    root = f"model.layers.{layer}.{ROOTS[family]}"
    sites = [site_of(schema, f"layers.{layer}.{key}") for key in ("gate_up", "down")]
    weights = [expert_weights(site, 2, seed) for seed, site in enumerate(sites)]
    tensors: Tensors = {}
    for inner, name, factors in zip((".base_layer", ""), ("gate_up", "down"), weights, strict=True):
        match form:
            case "peft-fused":
                tensors |= pair(root + inner, *packed(*factors))
            case "peft-fused-exchanged":
                tensors |= pair(root + inner, *exchanged(*factors))
            case "stacked-3d":
                tensors |= pair(f"{root}.{name}_proj", *factors)
            case "per-expert-fused":
                for e in range(len(factors[0])):
                    tensors |= pair(f"{root}.{e}.{name}_proj", factors[0][e], factors[1][e])
            case _:
                for e in range(len(factors[0])):
                    tensors |= pair(f"{root}.{name}_projs.{e}", factors[0][e], factors[1][e])
    config = config_of(target_parameters=["experts.gate_up_proj", "experts.down_proj"], peft_version="0.18.1")
    prefixed = {PREFIX + k: v for k, v in tensors.items()}
    built, deltas = ingest(write_adapter(tmp_path / "a", prefixed, config), schema, tmp_path)
    layouts = {s.layout for s in built.report.sites if s.site.endswith(".gate_up")}
    assert layouts == {"per-expert-fused" if form == "projs" else form}
    for site, (a, b) in zip(sites, weights, strict=True):
        for e in range(site.num_experts):
            expected = 2.0 * (b[e].double() @ a[e].double()).numpy()
            np.testing.assert_allclose(deltas[site.name, e], expected, rtol=1e-12, atol=1e-13)


def test_exchanged_columns_of_an_interleaved_model_stay_interleaved(tmp_path: Path) -> None:
    """There g0, u0, g1, u1 run along lora_A's columns."""
    root = "model.layers.0.mlp.experts"
    layout = {"layout": ParameterLayout.IN_OUT, "row_order": RowOrder.INTERLEAVED}
    schema = LoraSchema(1, tuple(experts(0, 4, 32, 24, root, root, **layout)))  # type: ignore[arg-type]
    a, b = expert_weights(schema.sites[0], 3, 0)
    lora_a, lora_b = exchanged(a, b)
    assert lora_a.shape == (12, 48)
    config = config_of(3, 6, target_parameters=["mlp.experts.gate_up_proj"])
    tensors = {PREFIX + k: v for k, v in pair(root, lora_a, lora_b).items()}
    _, deltas = ingest(write_adapter(tmp_path / "a", tensors, config), schema, tmp_path)
    for e in range(4):
        expected = 2.0 * (b[e].double() @ a[e].double()).numpy()
        np.testing.assert_allclose(deltas["layers.0.gate_up", e], expected, rtol=1e-12, atol=1e-13)


def test_tinkers_head_means_the_same_and_its_attention_is_refused_by_name(tmp_path: Path) -> None:
    """`unembed_tokens` without PEFT's prefix is the head; `attn` is no module of a family that is served."""
    schema = schema_of("qwen3_moe")
    ours = linear_pair("lm_head", 64, 528, 2, 2)
    theirs = {k.replace("lm_head", "unembed_tokens").removeprefix(PREFIX): v for k, v in ours.items()}
    expected, _ = ingest(write_adapter(tmp_path / "a", ours), schema, tmp_path)
    assert ingest(write_adapter(tmp_path / "b", theirs), schema, tmp_path)[0].digest == expected.digest
    theirs |= linear_pair("model.layers.2.attn.k_proj", 64, 64, 2, 1, prefix="")
    with pytest.raises(InvalidAdapterError, match=r"model\.layers\.2\.attn\.k_proj\.lora_A\.weight"):
        ingest(write_adapter(tmp_path / "c", theirs), schema, tmp_path)


def test_embeddings_of_a_raw_state_dict(tmp_path: Path) -> None:
    """The adapter's name stands behind the factor's."""
    schema = schema_of("qwen3_moe")
    ours = embedding_pair(site_of(schema, "embed"), "model.embed_tokens", 2)
    raw = {f"{key}.default": tensor for key, tensor in ours.items()}
    expected, _ = ingest(write_adapter(tmp_path / "a", ours), schema, tmp_path)
    assert ingest(write_adapter(tmp_path / "b", raw), schema, tmp_path)[0].digest == expected.digest


def test_a_rank_beyond_the_hidden_size_is_no_mistake(tmp_path: Path) -> None:
    """PEFT does not object either."""
    tensors = linear_pair("model.layers.0.self_attn.q_proj", 64, 128, 100)
    built, deltas = ingest(
        write_adapter(tmp_path / "a", tensors, config_of(100, 50)), schema_of("qwen3_moe"), tmp_path
    )
    a, b = (t.double().numpy() for _, t in sorted(tensors.items()))
    assert built.report.sites[0].rank == 100
    np.testing.assert_allclose(deltas["layers.0.q", -1], 0.5 * b @ a, rtol=1e-12, atol=1e-12)


def test_experts_of_a_dense_layer_are_refused(tmp_path: Path) -> None:
    """DeepSeek's first layer has none."""
    tensors = linear_pair("model.layers.0.mlp.experts.0.gate_proj", 64, 48)
    with pytest.raises(InvalidAdapterError, match=r"layers\.0\.mlp\.experts\.0"):
        ingest(write_adapter(tmp_path / "a", tensors), schema_of("deepseek_v3"), tmp_path)
