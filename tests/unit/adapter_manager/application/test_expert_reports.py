"""Faults other servers had, at the level of weights: columns, sides, names and rows of experts."""

from pathlib import Path

import numpy as np
import pytest
import torch

from adapter_manager.domain.errors import AmbiguousAdapterError, InvalidAdapterError
from adapter_manager.domain.layout_options import ExpertOrientation, ExpertPacking, LayoutOptions
from lorikeet_contract.schema import LoraSchema, ParameterLayout, RowOrder
from tests.support.adapter_directories import PREFIX, config_of, ingest, linear_pair, write_adapter
from tests.support.expert_layouts import LAYOUTS, Tensors, Weights, exchanged, packed, pair
from tests.support.lora_schemas import experts, linear, mixtral

ROOT = "model.layers.0.mlp.experts"
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def schema_of(num_experts: int, hidden: int, inner: int, **kwargs: object) -> LoraSchema:
    """One layer of experts."""
    return LoraSchema(1, tuple(experts(0, num_experts, hidden, inner, ROOT, ROOT, **kwargs)))  # type: ignore[arg-type]


def random_pair(num_experts: int, rank: int, in_features: int, out: int, seed: int = 0) -> Weights:
    """Factors of one parameter."""
    generator = torch.Generator().manual_seed(seed)
    shape_a, shape_b = (num_experts, rank, in_features), (num_experts, out, rank)
    return torch.randn(shape_a, generator=generator), torch.randn(shape_b, generator=generator)


def prefixed(tensors: Tensors) -> Tensors:
    """With PEFT's prefix."""
    return {PREFIX + k: v for k, v in tensors.items()}


def product(weights: Weights, expert: int, scale: float) -> np.ndarray:
    """The delta of one expert."""
    a, b = (w[expert].double().numpy() for w in weights)
    return scale * b @ a


def assert_deltas(
    deltas: dict[tuple[str, int], np.ndarray], site: str, weights: Weights, scale: float
) -> None:
    """Every expert's delta is the product of its own factors."""
    for expert in range(weights[0].shape[0]):
        np.testing.assert_allclose(
            deltas[site, expert], product(weights, expert, scale), rtol=1e-12, atol=1e-13
        )


def watermark(num_experts: int = 8, hidden: int = 64, rank: int = 2) -> Weights:
    """Expert e writes row 40 + e and no other."""
    a = torch.ones(num_experts, rank, 16)
    b = torch.zeros(num_experts, hidden, rank)
    for expert in range(num_experts):
        b[expert, 40 + expert] = 1
    return a, b


def test_b01_each_expert_keeps_its_own_columns(tmp_path: Path) -> None:
    """Rows of A run expert by expert, columns of B rank by rank."""
    tensors = prefixed(pair(ROOT, *packed(*watermark())))
    directory = write_adapter(tmp_path / "a", tensors, config_of(target_parameters=["mlp.experts.down_proj"]))
    _, deltas = ingest(directory, schema_of(8, 64, 16), tmp_path)
    rows = [np.nonzero(deltas["layers.0.down", e].any(axis=1))[0].tolist() for e in range(8)]
    assert rows == [[40 + e] for e in range(8)]


@pytest.mark.parametrize("by_marker", [False, True])
def test_b01_expert_major_files_are_read_when_they_say_so(tmp_path: Path, by_marker: bool) -> None:
    """By the uploader's option or the file's own marker; without either the file means what PEFT writes."""
    weights = random_pair(8, 2, 16, 64)
    tensors = prefixed(pair(ROOT, *packed(*weights, is_expert_major=True)))
    fields: dict[str, object] = {"target_parameters": ["mlp.experts.down_proj"]}
    if by_marker:
        fields["lora_B_layout"] = "grouped_by_expert"
    directory = write_adapter(tmp_path / "a", tensors, config_of(**fields))  # type: ignore[arg-type]
    options = None if by_marker else LayoutOptions(packing=ExpertPacking.EXPERT_MAJOR)
    built, deltas = ingest(directory, schema_of(8, 64, 16), tmp_path, options)
    assert_deltas(deltas, "layers.0.down", weights, 2.0)
    assert built.report.sites[0].layout == "peft-fused-expert-major"


def test_b01_contradictory_packing_is_refused(tmp_path: Path) -> None:
    """The file's marker and the option must not differ."""
    tensors = prefixed(pair(ROOT, *packed(*random_pair(8, 2, 16, 64))))
    config = config_of(target_parameters=["mlp.experts.down_proj"], lora_B_layout="rank_major")
    directory = write_adapter(tmp_path / "a", tensors, config)
    with pytest.raises(AmbiguousAdapterError, match="lora_B_layout"):
        ingest(directory, schema_of(8, 64, 16), tmp_path, LayoutOptions(packing=ExpertPacking.EXPERT_MAJOR))


@pytest.mark.parametrize("writer", ["0.18.1", "0.21.2"])
def test_b02_each_file_means_what_its_writer_computed(tmp_path: Path, writer: str) -> None:
    """Hidden 32, width 24, 4 experts, r=3, alpha=6: 0.18 has A on the output side."""
    gate_up, down = random_pair(4, 3, 32, 48), random_pair(4, 3, 24, 32, 1)
    layout = LAYOUTS["peft-fused-exchanged" if writer == "0.18.1" else "peft-fused"]
    tensors = prefixed(layout(ROOT, gate_up, down))
    inner = f"{PREFIX}{ROOT}.base_layer"
    expected = ([12, 48], [32, 12]) if writer == "0.18.1" else ([12, 32], [48, 12])
    shapes = (list(tensors[f"{inner}.lora_A.weight"].shape), list(tensors[f"{inner}.lora_B.weight"].shape))
    assert shapes == expected
    config = config_of(rank=3, alpha=6, peft_version=writer, target_parameters=BOTH)
    _, deltas = ingest(write_adapter(tmp_path / "a", tensors, config), schema_of(4, 32, 24), tmp_path)
    assert_deltas(deltas, "layers.0.gate_up", gate_up, 2.0)
    assert_deltas(deltas, "layers.0.down", down, 2.0)


@pytest.mark.parametrize("is_exchanged", [False, True])
def test_b02_square_parameter_follows_its_sibling(tmp_path: Path, is_exchanged: bool) -> None:
    """OLMoE: 2 * width == hidden. The version would say the other thing, the sibling is believed."""
    gate_up, down = random_pair(4, 2, 32, 32), random_pair(4, 2, 16, 32, 1)
    tensors = prefixed(LAYOUTS["peft-fused-exchanged" if is_exchanged else "peft-fused"](ROOT, gate_up, down))
    version = "0.21.2" if is_exchanged else "0.18.1"
    config = config_of(peft_version=version, target_parameters=BOTH)
    _, deltas = ingest(write_adapter(tmp_path / "a", tensors, config), schema_of(4, 32, 16), tmp_path)
    assert_deltas(deltas, "layers.0.gate_up", gate_up, 2.0)
    assert_deltas(deltas, "layers.0.down", down, 2.0)


@pytest.mark.parametrize(("version", "is_exchanged"), [("0.18.1", True), ("0.19.0", True), ("0.19.1", False)])
def test_b02_lone_square_parameter_follows_the_version(
    tmp_path: Path, version: str, is_exchanged: bool
) -> None:
    """Parameters stored [E, out, in]: the PEFT version decides."""
    gate_up = random_pair(4, 2, 32, 32)
    tensors = prefixed(pair(ROOT, *(exchanged(*gate_up) if is_exchanged else packed(*gate_up))))
    config = config_of(peft_version=version, target_parameters=BOTH[:1])
    _, deltas = ingest(write_adapter(tmp_path / "a", tensors, config), schema_of(4, 32, 16), tmp_path)
    assert_deltas(deltas, "layers.0.gate_up", gate_up, 2.0)


def test_b02_undecidable_file_needs_the_option(tmp_path: Path) -> None:
    """Square, alone, and by an unknown writer: refused, and loaded when the uploader says which."""
    gate_up = random_pair(4, 2, 32, 32)
    config = config_of(peft_version=..., target_parameters=BOTH[:1])
    directory = write_adapter(tmp_path / "a", prefixed(pair(ROOT, *packed(*gate_up))), config)
    with pytest.raises(AmbiguousAdapterError, match="expert orientation"):
        ingest(directory, schema_of(4, 32, 16), tmp_path)
    options = LayoutOptions(orientation=ExpertOrientation.STANDARD)
    _, deltas = ingest(directory, schema_of(4, 32, 16), tmp_path, options)
    assert_deltas(deltas, "layers.0.gate_up", gate_up, 2.0)


def test_b02_option_against_the_shapes_is_refused(tmp_path: Path) -> None:
    """An option can settle a doubt, not overrule the file."""
    tensors = prefixed(LAYOUTS["peft-fused"](ROOT, random_pair(4, 2, 32, 48), random_pair(4, 2, 24, 32)))
    directory = write_adapter(tmp_path / "a", tensors, config_of(target_parameters=BOTH))
    with pytest.raises(InvalidAdapterError, match="the upload says exchanged"):
        ingest(
            directory,
            schema_of(4, 32, 24),
            tmp_path,
            LayoutOptions(orientation=ExpertOrientation.EXCHANGED),
        )


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_b05_every_key_form_is_used_to_the_last_tensor(tmp_path: Path, layout: str) -> None:
    """Only experts, no attention: the count of tensors applied is the count in the file."""
    schema = LoraSchema(1, tuple(s for s in mixtral().sites if s.layer == 0))
    root = "model.layers.0.block_sparse_moe.experts" if layout == "w123" else ROOT
    gate_up, down = random_pair(4, 2, 64, 192), random_pair(4, 2, 96, 64, 1)
    tensors = prefixed(LAYOUTS[layout](root, gate_up, down))
    packing = ExpertPacking.EXPERT_MAJOR if layout.endswith("expert-major") else None
    directory = write_adapter(tmp_path / "a", tensors, config_of(target_parameters=BOTH))
    built, deltas = ingest(directory, schema, tmp_path, LayoutOptions(packing=packing))
    assert (built.report.tensors_used, built.report.tensors_total) == (len(tensors), len(tensors))
    assert_deltas(deltas, "layers.0.gate_up", gate_up, 2.0)
    assert_deltas(deltas, "layers.0.down", down, 2.0)


@pytest.mark.parametrize("parameter", [0, 1])
def test_b05_lone_parameter_is_the_one_that_was_targeted(tmp_path: Path, parameter: int) -> None:
    """Its keys are the same for either parameter; here the shapes would fit both."""
    weights = random_pair(4, 2, 32, 32)
    config = config_of(target_parameters=[BOTH[parameter]], peft_version="0.21.2")
    directory = write_adapter(tmp_path / "a", prefixed(pair(ROOT, *packed(*weights))), config)
    sites = experts(0, 4, 32, 16, ROOT, ROOT)
    square = LoraSchema(1, (sites[0], experts(0, 4, 32, 32, ROOT, ROOT)[1]))
    built, deltas = ingest(directory, square, tmp_path)
    key = ("layers.0.gate_up", "layers.0.down")[parameter]
    assert [s.site for s in built.report.sites] == [key]
    assert_deltas(deltas, key, weights, 2.0)
    config["target_parameters"] = BOTH
    write_adapter(directory, prefixed(pair(ROOT, *packed(*weights))), config)
    with pytest.raises(AmbiguousAdapterError, match="target_parameters"):
        ingest(directory, square, tmp_path)


@pytest.mark.parametrize(
    "extra", ["lora_C.weight", "base_layer.base_layer.lora_A.weight", "lora_A.bias", "experts_extra"]
)
def test_b05_left_over_tensor_is_an_error(tmp_path: Path, extra: str) -> None:
    """Nothing is dropped silently."""
    tensors = prefixed(LAYOUTS["peft-fused"](ROOT, random_pair(4, 2, 64, 192), random_pair(4, 2, 96, 64)))
    tensors[f"{PREFIX}{ROOT}.{extra}"] = torch.ones(2, 2)
    directory = write_adapter(tmp_path / "a", tensors, config_of(target_parameters=BOTH))
    with pytest.raises(InvalidAdapterError, match=extra.partition(".")[0]):
        ingest(directory, schema_of(4, 64, 96), tmp_path)


def test_per_expert_file_may_lack_experts_slices_and_have_scales_of_its_own(tmp_path: Path) -> None:
    """Missing experts are zero; ranks and scales differ inside one site; gate and up have their own A."""
    tensors: Tensors = {}
    tensors |= linear_pair(f"{ROOT}.0.gate_proj", 32, 24, 2, 1) | linear_pair(
        f"{ROOT}.0.up_proj", 32, 24, 3, 2
    )
    tensors |= linear_pair(f"{ROOT}.2.gate_proj", 32, 24, 9, 3) | linear_pair(
        f"{ROOT}.3.down_proj", 24, 32, 2, 4
    )
    config = config_of(
        rank=2, alpha=4, rank_pattern={"0.up_proj": 3, "2.gate_proj": 9}, alpha_pattern={"2.gate_proj": 3}
    )
    built, deltas = ingest(write_adapter(tmp_path / "a", tensors, config), schema_of(4, 32, 24), tmp_path)
    gate_up, down = built.manifest.layers[0].sites
    assert (gate_up.rank, gate_up.num_a, gate_up.a.shape) == (9, 2, (4, 32, 32))
    assert len(gate_up.scales) == 8
    assert (down.rank, down.num_a, down.scales) == (2, 1, (2.0,))

    def delta(module: str, scale: float) -> np.ndarray:
        a, b = (tensors[f"{PREFIX}{module}.lora_{side}.weight"].double().numpy() for side in "AB")
        return scale * b @ a

    expected = {
        ("layers.0.gate_up", 0): np.vstack(
            [delta(f"{ROOT}.0.gate_proj", 2.0), delta(f"{ROOT}.0.up_proj", 4 / 3)]
        ),
        ("layers.0.gate_up", 1): np.zeros((48, 32)),
        ("layers.0.gate_up", 2): np.vstack([delta(f"{ROOT}.2.gate_proj", 1 / 3), np.zeros((24, 32))]),
        ("layers.0.down", 3): delta(f"{ROOT}.3.down_proj", 2.0),
    }
    for key, value in expected.items():
        np.testing.assert_allclose(deltas[key], value, rtol=1e-12, atol=1e-13)


def test_shared_outer_factors_serve_all_experts(tmp_path: Path) -> None:
    """Layout 8: one A for gate and up, one B for down, shared by all experts."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    a1, b1, a3, b3 = rand(1, 2, 32), rand(4, 24, 2), rand(1, 2, 32), rand(4, 24, 2)
    a2, b2 = rand(4, 2, 24), rand(1, 32, 2)
    tensors = prefixed(pair(f"{ROOT}.w1", a1, b1) | pair(f"{ROOT}.w3", a3, b3) | pair(f"{ROOT}.w2", a2, b2))
    built, deltas = ingest(write_adapter(tmp_path / "a", tensors), schema_of(4, 32, 24), tmp_path)
    assert {s.layout for s in built.report.sites} == {"shared-outer"}
    for e in range(4):
        gate_up = torch.cat([b1[e].double() @ a1[0].double(), b3[e].double() @ a3[0].double()])
        np.testing.assert_allclose(deltas["layers.0.gate_up", e], 2 * gate_up.numpy(), rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(
            deltas["layers.0.down", e], 2 * (b2[0].double() @ a2[e].double()).numpy(), rtol=1e-12, atol=1e-13
        )


def test_granite_modules_of_the_parameter_itself(tmp_path: Path) -> None:
    """Layout 9: block_sparse_moe.input_linear holds the 3-D weight; patterns match its `weight`."""
    moe = "model.layers.0.block_sparse_moe"
    root = f"{moe}.experts"
    gate_up, down = random_pair(4, 3, 32, 48), random_pair(4, 2, 24, 32, 1)
    tensors = prefixed(
        pair(f"{moe}.input_linear", *exchanged(*gate_up)) | pair(f"{moe}.output_linear", *exchanged(*down))
    )
    config = config_of(peft_version="0.18.1", rank_pattern={"input_linear.weight": 3})
    schema = LoraSchema(1, tuple(experts(0, 4, 32, 24, root, root)))
    _, deltas = ingest(write_adapter(tmp_path / "a", tensors, config), schema, tmp_path)
    assert_deltas(deltas, "layers.0.gate_up", gate_up, 4 / 3)
    assert_deltas(deltas, "layers.0.down", down, 2.0)


@pytest.mark.parametrize("layout", ["peft-fused", "per-expert-fused", "stacked-3d"])
def test_b38_fused_rows_of_an_interleaved_model_stay_interleaved(tmp_path: Path, layout: str) -> None:
    """Hidden 32, width 24, 4 experts, r=3: rows g0, u0, g1, u1 are taken as they are."""
    gate_up, down = random_pair(4, 3, 32, 48), random_pair(4, 3, 24, 32, 1)
    schema = schema_of(4, 32, 24, layout=ParameterLayout.IN_OUT, row_order=RowOrder.INTERLEAVED)
    config = config_of(rank=3, alpha=6, target_parameters=BOTH)
    directory = write_adapter(tmp_path / "a", prefixed(LAYOUTS[layout](ROOT, gate_up, down)), config)
    _, deltas = ingest(directory, schema, tmp_path)
    assert_deltas(deltas, "layers.0.gate_up", gate_up, 2.0)


def test_b38_separate_gate_and_up_are_interleaved(tmp_path: Path) -> None:
    """A per-expert file for an interleaved model: even rows are gate's, odd rows up's."""
    gate_up, down = random_pair(4, 3, 32, 48), random_pair(4, 3, 24, 32, 1)
    schema = schema_of(4, 32, 24, layout=ParameterLayout.IN_OUT, row_order=RowOrder.INTERLEAVED)
    tensors = prefixed(LAYOUTS["per-expert"](ROOT, gate_up, down))
    _, deltas = ingest(write_adapter(tmp_path / "a", tensors, config_of(3, 6)), schema, tmp_path)
    for expert in range(4):
        whole = product(gate_up, expert, 2.0)
        np.testing.assert_allclose(
            deltas["layers.0.gate_up", expert][0::2], whole[:24], rtol=1e-12, atol=1e-13
        )
        np.testing.assert_allclose(
            deltas["layers.0.gate_up", expert][1::2], whole[24:], rtol=1e-12, atol=1e-13
        )


def test_router_by_target_parameters_takes_the_parameters_patterns(tmp_path: Path) -> None:
    """PEFT matches "mlp.gate.weight" where the parameter was targeted, "mlp.gate" where the module was."""
    schema = LoraSchema(1, (linear("router", 0, 32, 4, "model.layers.0.mlp.gate"),))
    tensors = linear_pair("model.layers.0.mlp.gate", 32, 4, rank=3)
    config = config_of(rank_pattern={"gate.weight": 3}, target_parameters=["mlp.gate.weight"])
    built, _ = ingest(write_adapter(tmp_path / "a", tensors, config), schema, tmp_path)
    assert built.report.sites[0].scales == (4 / 3,)
    config["target_parameters"] = []
    with pytest.raises(InvalidAdapterError, match="rank"):
        ingest(write_adapter(tmp_path / "a", tensors, config), schema, tmp_path)
