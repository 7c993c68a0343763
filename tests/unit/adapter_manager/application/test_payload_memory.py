"""Ingest of an adapter takes far less memory than the adapter, whichever way its tensors lie."""

import hashlib
import tracemalloc
from pathlib import Path

import pytest
import torch

from adapter_manager.application.ingest import IngestTarget, ingest_directory, payload_writer
from lorikeet_contract.schema import LoraSchema
from tests.support.adapter_directories import PREFIX, config_of, write_adapter
from tests.support.expert_layouts import LAYOUTS
from tests.support.lora_schemas import experts

ROOT = "model.layers.0.mlp.experts"


@pytest.mark.parametrize("layout", ["peft-fused", "peft-fused-exchanged", "per-expert", "stacked-3d"])
def test_peak_memory_is_that_of_a_few_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """15 MB of weights with blocks of 1 MiB: a peak below 6 MiB, and every layer's digest right."""
    monkeypatch.setattr(payload_writer, "BLOCK_BYTES", 1 << 20)
    num_experts, rank, hidden, inner = 16, 32, 4096, 2048
    gate_up = (
        torch.ones(num_experts, rank, hidden).bfloat16(),
        torch.ones(num_experts, 2 * inner, rank).bfloat16(),
    )
    down = (torch.ones(num_experts, rank, inner).bfloat16(), torch.ones(num_experts, hidden, rank).bfloat16())
    tensors = {PREFIX + k: v for k, v in LAYOUTS[layout](ROOT, gate_up, down).items()}
    config = config_of(rank, target_parameters=["gate_up_proj", "down_proj"])
    directory = write_adapter(tmp_path / "a", tensors, config)
    size = (directory / "adapter_model.safetensors").stat().st_size
    assert size > 14_000_000
    schema = LoraSchema(1, tuple(experts(0, num_experts, hidden, inner, ROOT, ROOT)))
    peak = _peak(directory, schema, tmp_path)
    assert peak < 6 << 20


def _peak(directory: Path, schema: LoraSchema, tmp_path: Path) -> int:
    tracemalloc.start()
    try:
        built = ingest_directory(directory, IngestTarget(schema, "b" * 64), tmp_path / "payload")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    payload = (tmp_path / "payload").read_bytes()
    for layer in built.manifest.layers:
        data = payload[layer.offset : layer.offset + layer.num_bytes]
        assert hashlib.sha256(data).hexdigest() == layer.sha256
    return peak
