"""What a config may say, in both styles, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_service.layers.rope import RopeParameters, rope_table
from inference_service.models import ModelConfigError, compute_dtype, describe_model, load_model
from inference_service.models.config import ConfigReader
from inference_service.models.rope_config import read_rope
from inference_service.models.spec import DenseMlpSpec, MoeSpec
from inference_service.models.window_config import layer_windows
from tests.support.tiny_model import write_model


def _yarn(**changes: Any) -> dict[str, Any]:
    return {"rope_scaling": {"type": "yarn", "factor": 4.0, **changes}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GptNeoForCausalLM"]}, "GptNeoForCausalLM.*supported are Qwen3MoeForCausalLM"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq'.*unquantized"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; this server supports 'silu'"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; expected at most num_experts, 4"),
        ({"hidden_size": None}, "hidden_size is missing; expected an integer"),
        ({"hidden_size": "32"}, "hidden_size is '32'; expected an integer"),
        ({"vocab_size": 0}, "vocab_size is 0; expected an integer of at least 1"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; expected a positive number"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1; expected true or false"),
        ({"mlp_only_layers": ["a"]}, "mlp_only_layers is .* expected a list of integers"),
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": 3}, "rope_scaling is 3; expected an object"),
        ({"architectures": 1}, "architectures is 1; expected a list of strings"),
        ({"architectures": True}, "architectures is True; expected a list of strings"),
        ({"architectures": [["Qwen3MoeForCausalLM"]]}, "architectures is .*; expected a list of strings"),
        ({"head_dim": 10**30}, "head_dim is 10{30}; expected an integer of at most 2147483647"),
        ({"hidden_size": 2**31}, "hidden_size is 2147483648; expected an integer of at most 2147483647"),
        ({"vocab_size": 10**400}, "vocab_size is 10{400}; expected an integer of at most 2147483647"),
        ({"eos_token_id": [4, 10**30]}, "eos_token_id is .*; expected integers of at most 2147483647"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf; expected a number between"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; expected a positive number"),
        ({"rms_norm_eps": 1e-300}, "rms_norm_eps is 1e-300; expected a number between"),
        ({"rope_theta": 10**400}, "rope_theta is 10{400}; expected a number between"),
        ({"rope_theta": float("inf")}, "rope_theta is inf; expected a number between"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor is inf; expected a number"),
        (_yarn(beta_fast=float("inf")), "beta_fast is inf; expected a number between"),
        (_yarn(beta_slow=1e300), r"beta_slow is 1e\+300; expected a number between"),
        (_yarn(attention_factor=float("inf")), "attention_factor is inf; expected a number between"),
        (_yarn(mscale=[]), r"mscale is \[\]; expected a positive number"),
        (_yarn() | {"rope_theta": 1.0}, "rope_theta is 1.0; expected a number above 1"),
    ],
)
def test_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    """The message names field, value and what would do."""
    with pytest.raises(ModelConfigError, match=message):
        describe_model(write_model(tmp_path, {}, **fields))


@pytest.mark.parametrize("content", ["", "[]", "{nope"])
def test_bad_json_is_refused(tmp_path: Path, content: str) -> None:
    """Not JSON, or not an object."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelConfigError, match="JSON"):
        describe_model(tmp_path)


def test_missing_directory_is_refused(tmp_path: Path) -> None:
    """Named, with what is expected there."""
    with pytest.raises(ModelConfigError, match="does not exist; the model directory must be"):
        describe_model(tmp_path / "nowhere")


def test_model_type_stands_in_for_missing_architectures(tmp_path: Path) -> None:
    """Some directories lack the field."""
    assert describe_model(write_model(tmp_path, {}, architectures=None)).architecture == "Qwen3MoeForCausalLM"


def test_sparse_step_and_dense_layers(tmp_path: Path) -> None:
    """Layers between the steps and listed ones are dense."""
    spec = describe_model(
        write_model(tmp_path, {}, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    ).spec
    kinds = [type(layer.mlp) for layer in spec.layers]
    assert kinds == [DenseMlpSpec, MoeSpec, DenseMlpSpec, DenseMlpSpec, DenseMlpSpec, MoeSpec]


def test_window_only_where_it_is_used(tmp_path: Path) -> None:
    """sliding_window without use_sliding_window means nothing."""
    for use, window in ((False, None), (True, 7)):
        spec = describe_model(write_model(tmp_path, {}, sliding_window=7, use_sliding_window=use)).spec
        assert [layer.attention.window for layer in spec.layers] == [window, window]


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        (5, "a list of strings"),
        ([5, 5], "a list of strings"),
        (["full_attention"], "2 of 'sliding_attention'"),
    ],
)
def test_odd_layer_types(kinds: object, wanted: str) -> None:
    """Named, whatever stands there."""
    config = ConfigReader("config.json", {"num_hidden_layers": 2, "layer_types": kinds})
    with pytest.raises(ModelConfigError, match=f"layer_types is .*; expected {wanted}"):
        layer_windows(config, lambda _index: True)


def test_both_rope_styles_mean_the_same() -> None:
    """rope_theta with rope_scaling, and rope_parameters."""
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    common = {"max_position_embeddings": 4096}
    old = {**common, "rope_theta": 5e5, "rope_scaling": {**scaling, "rope_type": "llama3"}}
    older = {**common, "rope_theta": 5e5, "rope_scaling": {**scaling, "type": "llama3"}}
    new = {**common, "rope_parameters": {**scaling, "rope_type": "llama3", "rope_theta": 5e5}}
    expected = RopeParameters(16, 5e5, "llama3", 8.0, 64, 1.0, 4.0)
    for fields in (old, older, new):
        assert read_rope(ConfigReader("config.json", fields), 16) == expected
    plain = ConfigReader("config.json", {**common, "rope_theta": 7.0, "rope_scaling": None})
    assert read_rope(plain, 16) == RopeParameters(16, 7.0, original_max_position=4096)


def test_rope_table_of_each_kind() -> None:
    """Default by formula; linear stretches positions; llama3 and yarn keep the fast turns."""
    cpu = torch.device("cpu")
    default = rope_table(RopeParameters(16, 100.0), 64, cpu)
    angle = 5 / 100 ** (6 / 16)
    assert default[5, :, 3].tolist() == pytest.approx(
        [torch.tensor(angle).cos().item(), torch.tensor(angle).sin().item()], abs=1e-6
    )
    linear = rope_table(RopeParameters(16, 100.0, "linear", factor=4.0), 64, cpu)
    assert torch.allclose(linear[4 * 7], default[7], atol=1e-5)
    for kind in ("llama3", "yarn"):
        parameters = RopeParameters(
            64, 1e6, kind, factor=8.0, original_max_position=512, attention_factor=1.0
        )
        table = rope_table(parameters, 64, cpu)
        fast_and_slow = rope_table(RopeParameters(64, 1e6), 64, cpu)
        assert torch.allclose(table[:, :, 0], fast_and_slow[:, :, 0], atol=1e-6)
        assert torch.allclose(table[8, :, -1], fast_and_slow[1, :, -1], atol=1e-6)
    yarn = rope_table(RopeParameters(64, 1e6, "yarn", factor=32.0, original_max_position=512), 2, cpu)
    assert yarn[0, 0, 0] == pytest.approx(0.1 * 3.4657359 + 1)


def test_generation_defaults(tmp_path: Path) -> None:
    """generation_config.json wins over config.json; a single end token and a list are both fine."""
    path = write_model(tmp_path, {}, eos_token_id=[4, 5])
    assert describe_model(path).defaults.eos_token_ids == (4, 5)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert describe_model(path).defaults.eos_token_ids == (7,)


def test_sampling_is_not_the_engines(tmp_path: Path) -> None:
    """`--generation-config none` is the way around odd sampling fields: the engine must not mind them."""
    path = write_model(tmp_path, {}, eos_token_id=4)
    (path / "generation_config.json").write_text(json.dumps({"temperature": "hot", "top_k": -1}))
    assert describe_model(path).defaults.eos_token_ids == (4,)


def test_sizes_that_no_memory_holds(tmp_path: Path) -> None:
    """In the range of integers, and still more than torch can lay out: named, not a torch error."""
    sizes = {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1, "head_dim": 8}
    description = describe_model(write_model(tmp_path, {}, **sizes))
    with pytest.raises(ModelConfigError, match=r"parameter \[2147483647, 2147483647\], for which cpu has no"):
        load_model(description, dtype=torch.float32, device=torch.device("cpu"), num_positions=8)


def test_single_strings_count_as_lists() -> None:
    """As single integers do; and null is as good as absent."""
    reader = ConfigReader("config.json", {"a": "x", "b": ["x", "y"], "c": None})
    assert [reader.texts(name, ("z",)) for name in "abcd"] == [("x",), ("x", "y"), ("z",), ("z",)]


def test_compute_dtype(tmp_path: Path) -> None:
    """Auto is float32 on a CPU, the model's own on a GPU; others by name."""
    description = describe_model(write_model(tmp_path, {}, torch_dtype="float16"))
    assert compute_dtype(description, "auto", torch.device("cpu")) == torch.float32
    assert compute_dtype(description, "auto", torch.device("cuda")) == torch.float16
    assert compute_dtype(description, "bfloat16", torch.device("cpu")) == torch.bfloat16
    with pytest.raises(ModelConfigError, match="dtype 'int8' is not supported"):
        compute_dtype(description, "int8", torch.device("cpu"))


def test_expert_count_has_two_names(tmp_path: Path) -> None:
    """num_experts, or num_local_experts as transformers 5 writes it."""
    spec = describe_model(write_model(tmp_path, {}, num_experts=None, num_local_experts=6)).spec
    counts = [layer.mlp.experts.num_experts for layer in spec.layers if isinstance(layer.mlp, MoeSpec)]
    assert counts == [6, 6]
