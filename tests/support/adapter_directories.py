"""Adapter directories made on the spot, sound ones and raw ones, and what ingest makes of them."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from adapter_manager.application.ingest import IngestTarget, ingest_directory
from adapter_manager.domain.built_revision import BuiltRevision
from adapter_manager.domain.layout_options import LayoutOptions
from lorikeet_contract.schema import LoraSchema
from tests.support.lora_deltas import Deltas, payload_deltas

PREFIX = "base_model.model."


def config_of(rank: int = 2, alpha: float = 4, **fields: object) -> dict[str, object]:
    """A minimal LoRA configuration; a field given as ... is left out."""
    config: dict[str, object] = {
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "peft_version": "0.21.2",
        **fields,
    }  # fmt: skip
    return {k: v for k, v in config.items() if v is not ...}


def write_adapter(
    directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, object] | None = None
) -> Path:
    """Write a directory as PEFT does."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config or config_of()))
    contiguous = {k: v.clone().contiguous() for k, v in tensors.items()}
    save_file(contiguous, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory


def safetensors_bytes(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file with this header, sound or not; `length` overrides what it says of the header's length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def linear_pair(
    module: str, in_features: int, out_features: int, rank: int = 2, seed: int = 0, prefix: str = PREFIX
) -> dict[str, torch.Tensor]:
    """A random pair for a Linear module."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{prefix}{module}.lora_A.weight": torch.randn(rank, in_features, generator=generator),
        f"{prefix}{module}.lora_B.weight": torch.randn(out_features, rank, generator=generator),
    }


def ingest(
    directory: Path,
    schema: LoraSchema,
    tmp_path: Path,
    options: LayoutOptions | None = None,
    **target: object,
) -> tuple[BuiltRevision, Deltas]:
    """Ingest a directory; returns the result and the payload's dense deltas."""
    payload_path = tmp_path / "payload"
    built = ingest_directory(
        directory,
        IngestTarget(schema, "b" * 64, **target),
        payload_path,
        options,  # type: ignore[arg-type]
    )
    return built, payload_deltas(built.manifest, payload_path.read_bytes(), schema)
