"""Random adapters as PEFT saves them, for stacks with a manager: every expert under a name of its own."""

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lorikeet_bench.load.generated_adapters import AdapterShape, weight_values
from lorikeet_contract.manifest import PayloadDtype
from lorikeet_contract.schema import LoraSchema, LoraSite, SiteKind

_SAFETENSORS_DTYPES = {
    PayloadDtype.FLOAT32: "F32",
    PayloadDtype.BFLOAT16: "BF16",
    PayloadDtype.FLOAT16: "F16",
}


def write_peft_adapter(directory: Path, schema: LoraSchema, shape: AdapterShape, seed: int) -> Path:
    """Write adapter_config.json and adapter_model.safetensors; other seeds give other weights."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    values = weight_values(shape.dtype)
    tensors: list[tuple[str, tuple[int, int]]] = []
    targets: set[str] = set()
    for site in shape.chosen(schema):
        for module, out_features in _modules(site):
            targets.add(module.rpartition(".")[2])
            name = f"base_model.model.{module}"
            tensors.append((f"{name}.lora_A.weight", (shape.rank, site.in_features)))
            tensors.append((f"{name}.lora_B.weight", (out_features, shape.rank)))
    # The library writes bfloat16 for torch only, which this room does without; the format is one header.
    header = _header(tensors, shape.dtype)
    with (directory / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for _, (rows, columns) in tensors:
            begin = int(rng.integers(len(values)))
            file.write(np.take(values, np.arange(begin, begin + rows * columns), mode="wrap").tobytes())
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": shape.rank,
        "lora_alpha": shape.rank,
        "bias": "none",
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def _header(tensors: Sequence[tuple[str, tuple[int, int]]], dtype: PayloadDtype) -> bytes:
    """The JSON before the data; spaces bring its end to a multiple of eight."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (rows, columns) in tensors:
        begin, end = end, end + rows * columns * dtype.itemsize
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[dtype],
            "shape": [rows, columns],
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)


def _modules(site: LoraSite) -> Iterator[tuple[str, int]]:
    """(module path, its output rows) of every weight that the site stands for."""
    for piece in site.slices:
        path = piece.modules[0]
        if site.kind is SiteKind.EXPERTS:
            for expert in range(site.num_experts):
                yield path.format(expert=expert), piece.out_features
        else:
            yield path, piece.out_features
