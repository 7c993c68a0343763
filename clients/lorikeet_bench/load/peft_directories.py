"""Random adapters as PEFT saves them, for stacks with a manager: every expert under a name of its own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import serialize_file

from lorikeet_bench.load.generated_adapters import AdapterShape, weight_values
from lorikeet_contract.manifest import PayloadDtype
from lorikeet_contract.schema import LoraSchema, LoraSite, SiteKind

_SAFETENSORS_DTYPES = {
    PayloadDtype.FLOAT32: "float32",
    PayloadDtype.BFLOAT16: "bfloat16",
    PayloadDtype.FLOAT16: "float16",
}


def write_peft_adapter(directory: Path, schema: LoraSchema, shape: AdapterShape, seed: int) -> Path:
    """Write adapter_config.json and adapter_model.safetensors; other seeds give other weights."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    values = weight_values(shape.dtype)
    tensors: dict[str, dict[str, Any]] = {}
    targets: set[str] = set()
    for site in shape.chosen(schema):
        for module, out_features in _modules(site):
            targets.add(module.rpartition(".")[2])
            for suffix, (rows, columns) in (
                ("lora_A", (shape.rank, site.in_features)),
                ("lora_B", (out_features, shape.rank)),
            ):
                begin = int(rng.integers(len(values)))
                cut = np.take(values, np.arange(begin, begin + rows * columns), mode="wrap")
                tensors[f"base_model.model.{module}.{suffix}.weight"] = {
                    "dtype": _SAFETENSORS_DTYPES[shape.dtype],
                    "shape": [rows, columns],
                    "data": cut.tobytes(),
                }
    write: Any = serialize_file  # typed for a record that it does not export
    write(tensors, str(directory / "adapter_model.safetensors"))
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


def _modules(site: LoraSite) -> Iterator[tuple[str, int]]:
    """(module path, its output rows) of every weight that the site stands for."""
    for piece in site.slices:
        path = piece.modules[0]
        if site.kind is SiteKind.EXPERTS:
            for expert in range(site.num_experts):
                yield path.format(expert=expert), piece.out_features
        else:
            yield path, piece.out_features
