"""adapter_config.json: values that mean a certain scale are read, everything else is refused by name."""

import json

import pytest

from adapter_manager.domain.errors import InvalidAdapterError, UnsupportedAdapterError
from adapter_manager.domain.layout_options import ExpertPacking
from adapter_manager.domain.peft_config import PeftConfig, parse_peft_config
from tests.support.adapter_directories import config_of


def parse(**fields: object) -> PeftConfig:
    """Parse a minimal configuration with these fields."""
    return parse_peft_config(json.dumps(config_of(**fields)).encode())  # type: ignore[arg-type]


def test_minimal_config_is_enough() -> None:
    """What PEFT 0.3 wrote has neither a version nor patterns."""
    config = parse(rank=4, alpha=8, peft_version=...)
    assert (config.rank, config.alpha, config.peft_version, config.rank_pattern) == (4, 8.0, None, ())
    assert config.scale(4, 8.0) == 2.0


@pytest.mark.parametrize(("rank", "alpha", "scale"), [(16, 16, 4.0), (3, 6, 3.4641016151377544)])
def test_rslora_divides_by_the_root_of_the_modules_rank(rank: int, alpha: float, scale: float) -> None:
    """The scale is alpha / sqrt(r), not alpha / r."""
    assert parse(use_rslora=True).scale(rank, alpha) == pytest.approx(scale, abs=1e-12)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0),
        ("r", -8),
        ("r", "8"),
        ("r", 8.0),
        ("r", True),
        ("r", 10**9),
        ("r", None),
        ("r", ...),
        ("lora_alpha", 0),
        ("lora_alpha", -1),
        ("lora_alpha", "16"),
        ("lora_alpha", True),
        ("lora_alpha", 1e300),
        ("lora_alpha", float("nan")),
        ("lora_alpha", float("inf")),
        ("lora_alpha", None),
        ("lora_alpha", ...),
        ("rank_pattern", {"q_proj": 10**8}),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", ["q_proj"]),
        ("alpha_pattern", {"q_proj": float("nan")}),
        ("alpha_pattern", {"q" * 1001: 4}),
        ("use_rslora", 1),
        ("target_parameters", "mlp.experts.gate_up_proj"),
        ("target_parameters", [1]),
        ("peft_type", ...),
        ("peft_type", None),
        ("init_lora_weights", 3),
    ],
)
def test_impossible_value_is_refused_by_field(field: str, value: object) -> None:
    """A file without lora_alpha has no certain scale."""
    with pytest.raises(InvalidAdapterError) as caught:
        parse(**{field: value})
    assert caught.value.reason == "INVALID_ADAPTER"
    assert field in caught.value.message
    assert caught.value.metadata["field"].startswith(field)


@pytest.mark.parametrize("field", ["r", "lora_alpha"])
def test_a_missing_value_has_advice(field: str) -> None:
    """Which one to add is the trainer's to know."""
    with pytest.raises(InvalidAdapterError, match=f"has no {field}, .*: add"):
        parse(**{field: ...})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("lora_bias", True),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1]),
        ("layer_replication", [[0, 2]]),
        ("alora_invocation_tokens", [5]),
        ("alora_invocation_tokens", []),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 1}),
        ("kasa_config", {"beta": 1}),
        ("monteclora_config", {"n": 1}),
        ("lora_ga_config", {"scale": 1}),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "brand_new"),
        ("peft_type", "IA3"),
        ("peft_type", ["LORA"]),
        ("lora_B_layout", "unknown"),
        ("some_new_maths", True),
        ("some_new_maths", {"a": 1}),
    ],
)
def test_what_plain_lora_does_not_compute_is_refused_by_name(field: str, value: object) -> None:
    """A flag that is true without its tensors, and every field that is not known."""
    with pytest.raises(UnsupportedAdapterError) as caught:
        parse(**{field: value})
    assert field in caught.value.message
    assert field in caught.value.metadata["field"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_dropout", 0.1),
        ("inference_mode", False),
        ("target_modules", "all-linear"),
        ("target_modules", ["q_proj"]),
        ("layers_to_transform", [1]),
        ("exclude_modules", ["x"]),
        ("init_lora_weights", "gaussian"),
        ("init_lora_weights", "eva"),
        ("init_lora_weights", False),
        ("auto_mapping", {"base_model_class": "Popen", "parent_library": "subprocess"}),
        ("base_model_name_or_path", "../../../../etc"),
        ("base_model_name_or_path", None),
        ("megatron_core", "megatron.core"),
        ("modules_to_save", []),
        ("bias", None),
        ("use_dora", None),
        ("future_field", None),
        ("future_field", False),
        ("future_field", {}),
        ("future_field", 0),
        ("peft_version", 3),
        ("loftq_config", {"bits": 4}),
        ("eva_config", {"rho": 2.0}),
    ],
)
def test_harmless_fields_load(field: str, value: object) -> None:
    """Training, bookkeeping, and unknown fields that say nothing."""
    assert parse(**{field: value}).rank == 2


@pytest.mark.parametrize(
    ("text", "version"),
    [("0.19.1", (0, 19, 1)), ("0.19.1.dev0", (0, 19, 1)), ("0.17.1", (0, 17, 1)), ("x", None), ("²", None)],
)
def test_version_is_read_as_far_as_it_is_numbers(text: str, version: tuple[int, ...] | None) -> None:
    """Development versions count as their release."""
    assert parse(peft_version=text).peft_version == version


def test_packing_marker_is_read() -> None:
    """Unsloth writes it since September 2026."""
    assert parse(lora_B_layout="grouped_by_expert").packing is ExpertPacking.EXPERT_MAJOR
    assert parse(lora_B_layout="rank_major").packing is ExpertPacking.RANK_MAJOR
    assert parse().packing is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not json",
        b"[]",
        b"{}",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000,
        b'{"peft_type":"LORA","peft_type":"IA3"}',
        b'{"r": 1' + b"0" * 5000 + b"}",
        b'{"lora_alpha": 1' + b"0" * 400 + b"}",
        b"version https://git-lfs.github.com/spec/v1\n",
        b'{"a": [' + b"0," * 300_000 + b"0]}",
    ],
)
def test_what_is_no_config_is_refused(data: bytes) -> None:
    """Not JSON, no object, too deep for a parser, too many values, or a key twice."""
    with pytest.raises(InvalidAdapterError) as caught:
        parse_peft_config(data)
    assert len(caught.value.message) < 300
    assert caught.value.message.isascii()
