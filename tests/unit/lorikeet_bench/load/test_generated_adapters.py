"""Generated adapters: canonical payloads and PEFT directories that the services' own readers accept."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from inference_service.execution.adapter_layout import AdapterPlacer
from lorikeet_bench.load.generated_adapters import (
    AdapterShape,
    weight_values,
    write_random_adapters,
    write_watermark_adapters,
)
from lorikeet_bench.load.lengths import LoadError
from lorikeet_bench.load.peft_directories import write_peft_adapter
from lorikeet_bench.load.rig_tokens import RigTokens, rig_shape
from lorikeet_bench.rigs import RigShape, embedding
from lorikeet_contract.manifest import Manifest, PayloadDtype, PayloadSite, TensorRange
from lorikeet_contract.schema import LoraSchema, LoraSite, SiteKind, SiteSlice

BASE = "b" * 64


def site(key: str, kind: SiteKind, in_features: int, out_features: int, num_experts: int = 0) -> LoraSite:
    """A site of layer 0, of gate and up where it is theirs."""
    names = ("gate", "up") if key == "gate_up" else (key,)
    inside = "experts.{expert}." if num_experts else ""
    slices = tuple(
        SiteSlice(name, out_features // len(names), (f"model.layers.0.{inside}{name}_proj",))
        for name in names
    )
    return LoraSite(key, 0, kind, in_features, out_features, slices, num_experts=num_experts)


SCHEMA = LoraSchema(
    1,
    (
        site("q", SiteKind.LINEAR, 24, 40),
        site("gate_up", SiteKind.EXPERTS, 24, 32, 3),
        site("down", SiteKind.EXPERTS, 16, 24, 3),
    ),
)
SHAPE = AdapterShape(rank=5, sites=("q", "gate_up", "down"))


def bfloat16(payload: bytes, where: TensorRange) -> torch.Tensor:
    """A tensor of a payload."""
    count = math.prod(where.shape)
    return torch.frombuffer(bytearray(payload), dtype=torch.bfloat16, offset=where.offset, count=count).view(
        where.shape
    )


def test_random_adapters_are_whole_revisions(tmp_path: Path) -> None:
    """The node's own check places them; digests are the manifests', and each is another."""
    store = write_random_adapters(tmp_path, SCHEMA, BASE, SHAPE, 3)
    assert store.url == tmp_path.as_uri()
    assert len({adapter.digest for adapter in store.adapters}) == 3
    placer = AdapterPlacer(SCHEMA, BASE, 2, max_rank=8)
    for adapter in store.adapters:
        place = tmp_path / adapter.store_path
        manifest = Manifest.from_json((place / "manifest.json").read_bytes())
        assert manifest.digest == adapter.digest
        assert (place / "payload").stat().st_size == manifest.payload_bytes == adapter.payload_bytes
        assert placer.place(manifest).num_bytes == SHAPE.num_bytes(SCHEMA, 2)
    assert write_random_adapters(tmp_path / "again", SCHEMA, BASE, SHAPE, 3).adapters == store.adapters


def test_no_weight_is_zero_but_the_padding(tmp_path: Path) -> None:
    """Rank 5 is stored as 8: three rows of each A and columns of each B are zero, everything else is not."""
    (adapter,) = write_random_adapters(tmp_path, SCHEMA, BASE, SHAPE, 1).adapters
    place = tmp_path / adapter.store_path
    payload = (place / "payload").read_bytes()
    sites = Manifest.from_json((place / "manifest.json").read_bytes()).layers[0].sites
    assert [found.key for found in sites] == ["q", "gate_up", "down"]

    def check(found: PayloadSite) -> None:
        a, b = bfloat16(payload, found.a), bfloat16(payload, found.b)
        rows, columns = a.unflatten(-2, (-1, 8)).movedim(-2, 0), b.movedim(-1, 0)
        for part in (rows, columns):
            assert (part[5:] == 0).all()
            assert (part[:5] != 0).float().mean() > 0.99
            assert 0.01 < part[:5].float().std() < 0.04

    for found in sites:
        check(found)


def test_bfloat16_is_rounded_as_torch_does() -> None:
    """To nearest, ties to even."""
    exact = torch.from_numpy(weight_values(PayloadDtype.FLOAT32)[:10_000])
    bits = weight_values(PayloadDtype.BFLOAT16)[:10_000]
    assert torch.equal(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), exact.to(torch.bfloat16))


def test_watermarks_write_their_token_into_every_expert(tmp_path: Path) -> None:
    """B's first column is the token's embedding row, for each expert."""
    rig = RigShape()
    schema = LoraSchema(1, (site("down", SiteKind.EXPERTS, rig.intermediate, rig.vocab, rig.experts),))
    store = write_watermark_adapters(tmp_path, schema, BASE, rig, (3, 9))
    for adapter, token in zip(store.adapters, (3, 9), strict=True):
        place = tmp_path / adapter.store_path
        (down,) = Manifest.from_json((place / "manifest.json").read_bytes()).layers[0].sites
        payload = (place / "payload").read_bytes()
        b = np.frombuffer(payload, np.float32, math.prod(down.b.shape), down.b.offset).reshape(down.b.shape)
        direction = b[:, :, 0] / np.linalg.norm(b[:, :, 0], axis=1, keepdims=True)
        assert direction == pytest.approx(np.tile(embedding(rig)[token], (rig.experts, 1)), abs=1e-6)


def test_a_peft_directory_names_every_expert(tmp_path: Path) -> None:
    """Shapes as PEFT has them; other seeds, other weights."""
    tensors = load_file(write_peft_adapter(tmp_path / "a", SCHEMA, SHAPE, 1) / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.0."
    assert len(tensors) == 2 * (1 + 3 * 3)
    assert tensors[f"{prefix}q_proj.lora_A.weight"].shape == (5, 24)
    assert tensors[f"{prefix}experts.2.up_proj.lora_B.weight"].shape == (16, 5)
    assert tensors[f"{prefix}experts.2.down_proj.lora_A.weight"].dtype == torch.bfloat16
    other = load_file(write_peft_adapter(tmp_path / "b", SCHEMA, SHAPE, 2) / "adapter_model.safetensors")
    assert all((tensors[name] != other[name]).any() for name in tensors)


def test_sites_that_are_not_named_are_the_models() -> None:
    """Routers, gates of shared experts, the embedding and the head are left out, unless they are named."""
    outside = [site(key, SiteKind.LINEAR, 24, 8) for key in ("router", "shared_gate", "embed", "lm_head")]
    schema = LoraSchema(1, (*SCHEMA.sites, *outside))
    assert AdapterShape().chosen(schema) == SCHEMA.sites
    assert AdapterShape(sites=("router",)).chosen(schema) == (outside[0],)


def test_what_cannot_be_made_is_refused() -> None:
    """A site that the model lacks, a rank out of range, a rig too small."""
    with pytest.raises(LoadError, match="sites head are not the model's, which has down, gate_up, q"):
        AdapterShape(sites=("q", "head")).num_bytes(SCHEMA, 2)
    with pytest.raises(LoadError, match="rank 0"):
        AdapterShape(rank=0, sites=("q",)).num_bytes(SCHEMA, 2)
    with pytest.raises(LoadError, match="room for 31 adapters, not 40"):
        RigTokens(rig_shape(4), 40)
    assert RigTokens(rig_shape(40), 40).forced == tuple(range(1, 41))
