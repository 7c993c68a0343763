"""Reading checkpoints: strict, sharded, identified."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inference_service.models import CheckpointError, LoadedModel, describe_model, load_model
from tests.support.tiny_model import CONFIG, make_weights, write_model


def load(path: Path) -> LoadedModel:
    """In float32 on the CPU."""
    return load_model(describe_model(path), dtype=torch.float32, device=torch.device("cpu"), num_positions=64)


def test_fused_parameters_hold_the_checkpoints_rows(tmp_path: Path) -> None:
    """Experts become [E, 2I, H] with gate before up; q, k, v lie side by side."""
    weights = make_weights(CONFIG)
    layer = load(write_model(tmp_path, weights)).decoder.layers[1]
    experts = layer.mlp.experts  # pyright: ignore[reportAttributeAccessIssue]
    prefix = "model.layers.1.mlp.experts.3"
    np.testing.assert_array_equal(experts.gate_up.weight[3, :16], weights[f"{prefix}.gate_proj.weight"])
    np.testing.assert_array_equal(experts.gate_up.weight[3, 16:], weights[f"{prefix}.up_proj.weight"])
    np.testing.assert_array_equal(experts.down.weight[3], weights[f"{prefix}.down_proj.weight"])
    fused = [weights[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"]
    np.testing.assert_array_equal(layer.attention.qkv.weight, np.concatenate(fused))


def test_shards_give_the_same_model(tmp_path: Path) -> None:
    """An index over three files, against one file."""
    one, three = load(write_model(tmp_path / "a")), load(write_model(tmp_path / "b", num_shards=3))
    assert torch.equal(one.decoder.lm_head.weight, three.decoder.lm_head.weight)
    assert one.schema == three.schema


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "2 missing: model.layers.0.mlp.experts.1.up_proj.weight; model.norm.weight"),
        ("misshaped", r"lm_head.weight is \[40, 31\], config.json makes it \[40, 32\]"),
        ("unexpected", "1 unexpected: model.layers.9.mystery.weight"),
    ],
)
def test_every_misfit_is_named(tmp_path: Path, change: str, message: str) -> None:
    """Missing, misshaped and left-over tensors end the load, by name."""
    weights = make_weights(CONFIG)
    if change == "missing":
        del weights["model.norm.weight"], weights["model.layers.0.mlp.experts.1.up_proj.weight"]
    elif change == "misshaped":
        weights["lm_head.weight"] = weights["lm_head.weight"][:, :31].copy()
    else:
        weights["model.layers.9.mystery.weight"] = np.zeros(3, np.float32)
    with pytest.raises(CheckpointError, match=message):
        load(write_model(tmp_path, weights))


def test_computed_buffers_and_a_tied_head_may_be_left_over(tmp_path: Path) -> None:
    """Old files hold inverse frequencies; a tied checkpoint may hold the head as well."""
    weights = make_weights(CONFIG)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    model = load(write_model(tmp_path, weights, tie_word_embeddings=True)).decoder
    assert model.lm_head.weight is model.embed.weight


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b"", "cannot be read"),
        (lambda b: b[:7], "no safetensors file or was cut short"),
        (lambda b: b[:40], "no safetensors file or was cut short"),
        (lambda b: b[:-5], "needs .* bytes, but the header gives it bytes"),
        (lambda b: (2**40).to_bytes(8, "little") + b[8:], "no safetensors file"),
        (lambda b: b[:8] + b"{" * 20 + b[28:], "header is damaged"),
        (lambda b: b.replace(b'"F32"', b'"F33"', 1), "unknown dtype 'F33'"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage: Any, message: str) -> None:
    """Each with the file's name and no crash."""
    file = write_model(tmp_path) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_missing_and_foreign_shards_are_refused(tmp_path: Path) -> None:
    """No weights at all; an index to a file that is not there, or outside the directory."""
    (write_model(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for shard, message in (("gone.safetensors", "does not exist"), ("../../etc/passwd", "not a file beside")):
        index.write_text(json.dumps({"weight_map": {"a": shard}}))
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="is damaged"):
        load(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """Which one would count is anybody's guess."""
    path = write_model(tmp_path, num_shards=2)
    data = (path / "model-00001-of-00002.safetensors").read_bytes()
    (path / "model-00002-of-00002.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="is in both"):
        load(path)


def test_base_digest_follows_the_model(tmp_path: Path) -> None:
    """Equal for a copy and for fields that tools rewrite; different for any weight or any other field."""
    weights = make_weights(CONFIG)
    digest = load(write_model(tmp_path / "a", weights)).base_digest
    assert load(write_model(tmp_path / "b", weights, transformers_version="9")).base_digest == digest
    assert load(write_model(tmp_path / "c", weights, rope_theta=5.0)).base_digest != digest
    weights["model.layers.1.mlp.gate.weight"][0, 0] += 1
    assert load(write_model(tmp_path / "d", weights)).base_digest != digest


def test_schema_records_embedding_and_head(tmp_path: Path) -> None:
    """Dtype and sha256 of the stored bytes, for adapters that carry a copy of the base's tensors."""
    weights = make_weights(CONFIG)
    sites = {site.name: site for site in load(write_model(tmp_path, weights)).schema.sites}
    for key, name in (("embed", "model.embed_tokens.weight"), ("lm_head", "lm_head.weight")):
        assert sites[key].base_weight_dtype == "F32"
        assert sites[key].base_weight_sha256 == hashlib.sha256(weights[name].tobytes()).hexdigest()
    assert sites["layers.0.q"].base_weight_sha256 == ""


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    """For benches: the right shapes, seeded."""
    (write_model(tmp_path) / "model.safetensors").unlink()
    models = [
        load_model(
            describe_model(tmp_path),
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            num_positions=8,
            load_format="dummy",
        )
        for _ in range(2)
    ]
    assert torch.equal(models[0].decoder.lm_head.weight, models[1].decoder.lm_head.weight)
    assert models[0].decoder.final_norm.weight.float().mean() == pytest.approx(1, abs=0.05)
