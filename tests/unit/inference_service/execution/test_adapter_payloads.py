"""Hand-written payloads through host pool and arena: the served model equals the merged one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_service.execution.backend import DeviceBackend
from lorikeet_contract.manifest import PayloadDtype
from lorikeet_contract.schema import LoraSchema, SiteKind
from tests.support.payloads import SiteWeights, random_site, write_payload
from tests.support.runner import GREEDY, DrivenRequest, drive, make_backend
from tests.support.tiny_model import CONFIG, make_weights, write_model

FIELDS: dict[str, Any] = {"mlp_only_layers": [0], "num_hidden_layers": 3}
TOKENS = [3, 17, 17, 0, 39, 8, 21, 2, 5, 30]


def merged(weights: dict[str, np.ndarray], sites: list[SiteWeights]) -> dict[str, np.ndarray]:
    """The checkpoint with every site's delta added, slice by slice."""
    result = {name: value.copy() for name, value in weights.items()}
    for site in sites:
        delta = site.delta()
        if site.site.kind is not SiteKind.EXPERTS:
            delta = delta[None]
        begin = 0
        for piece in site.site.slices:
            rows = slice(begin, begin + piece.out_features)
            begin = rows.stop
            for expert, part in enumerate(delta):
                name = f"{piece.modules[0].format(expert=expert)}.weight"
                result[name] += (part if site.site.kind is SiteKind.EMBEDDING else part[rows]).astype(
                    np.float32
                )
    return result


def logprobs(backend: DeviceBackend, slot: int) -> np.ndarray:
    """Log-probabilities of the vocabulary after each prompt token but the last."""
    sampling = type(GREEDY)(max_tokens=1, temperature=0.0, prompt_logprobs=CONFIG["vocab_size"])
    result = drive(backend, [DrivenRequest(TOKENS, slot, sampling)], num_tokens=1)[0]
    rows = np.empty((len(result.prompt_logprobs), CONFIG["vocab_size"]))
    for row, entry in zip(rows, result.prompt_logprobs, strict=True):
        row[list(entry.top_ids)] = entry.top_logprobs
    return rows


def load(
    backend: DeviceBackend, path: Path, sites: list[SiteWeights], dtype: PayloadDtype, slot: int
) -> None:
    """Write, read, copy: the adapter is active afterwards."""
    schema = LoraSchema.from_json(backend.info.lora_schema)
    manifest = write_payload(path, schema, backend.info.base_digest, sites, dtype)
    assert backend.host_pool.read(manifest, str(path)) == backend.host_pool.bytes_needed(manifest)
    assert backend.arena.begin_copy(manifest.digest, slot)
    assert list(backend.arena.poll()) == [slot]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one site of each kind": ("", {"rank": 4}),
    "every rank padding": ("", {"rank": 1}),
    "own A for gate and up": ("gate_up", {"rank": 5, "num_a": 2}),
    "a scale for each slice": ("gate_up", {"rank": 8, "scales": (0.5, -2.0)}),
    "a scale for each expert and slice": (
        "layers.1.gate_up",
        {"rank": 3, "num_a": 2, "scales": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)},
    ),
    "a scale for each expert": ("layers.1.down", {"rank": 9, "scales": (1.0, 2.0, -1.0, 0.5)}),
    "the embedding scaled": ("embed", {"rank": 4, "scales": (3.0,)}),
    "rank beyond hidden": ("q", {"rank": 40}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_merged_model(tmp_path: Path, case: str) -> None:
    """Sites of every kind, dense layers included, with every form of scale."""
    pattern, options = CASES[case]
    weights = make_weights(CONFIG | FIELDS)
    backend = make_backend(
        model_dir=str(write_model(tmp_path / "base", weights, **FIELDS)), max_context_tokens=64
    )
    schema = LoraSchema.from_json(backend.info.lora_schema)
    sites = [
        random_site(site, seed=index, **options)
        for index, site in enumerate(schema.sites)
        if site.name.endswith(pattern)
    ]
    assert sites
    load(backend, tmp_path / "payload", sites, PayloadDtype.FLOAT32, 2)
    expected = logprobs(
        make_backend(
            model_dir=str(write_model(tmp_path / "merged", merged(weights, sites), **FIELDS)),
            max_context_tokens=64,
        ),
        -1,
    )
    served = logprobs(backend, 2)
    assert np.abs(served - expected).max() < 1e-3
    assert np.abs(served - logprobs(backend, -1)).max() > 1e-2


@pytest.mark.parametrize("payload", list(PayloadDtype))
@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
def test_payload_and_compute_dtypes_mix(tmp_path: Path, payload: PayloadDtype, compute: str) -> None:
    """Any payload dtype on any compute dtype moves the model alike."""
    path = write_model(tmp_path / "base")
    reference = make_backend(model_dir=str(path), max_context_tokens=64)
    backend = make_backend(model_dir=str(path), dtype=compute, max_context_tokens=64)
    schema = LoraSchema.from_json(backend.info.lora_schema)
    sites = [random_site(s, 4, scales=(0.25,), seed=i) for i, s in enumerate(schema.sites) if s.key in "qvo"]
    load(reference, tmp_path / "a", sites, PayloadDtype.FLOAT32, 0)
    load(backend, tmp_path / "b", sites, payload, 0)
    moved = logprobs(backend, 0) - logprobs(backend, -1)
    expected = logprobs(reference, 0) - logprobs(reference, -1)
    tolerance = 1e-3 if compute == "float32" and payload is PayloadDtype.FLOAT32 else 0.25
    assert np.median(np.abs(moved - expected)) < tolerance * np.median(np.abs(expected))
