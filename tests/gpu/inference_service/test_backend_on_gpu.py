"""The device room on a GPU: the same answers as the CPU backend, adapters copied on a stream of their own."""

from pathlib import Path

import numpy as np
import pytest
import torch

from inference_service.execution.arena_copy import CudaCopy
from inference_service.execution.backend import DeviceBackend
from lorikeet_contract.manifest import Manifest, PayloadDtype
from lorikeet_contract.schema import LoraSchema
from tests.support.payloads import random_site, write_payload
from tests.support.runner import GREEDY, Driven, DrivenRequest, drive, make_backend
from tests.support.tiny_model import CONFIG, make_weights, write_model

PROMPT = (3, 17, 17, 0, 39, 8, 21, 2, 5, 30, 11, 12, 13, 14, 15, 16, 18, 19)
FIELDS = {"mlp_only_layers": [0], "num_hidden_layers": 3}
SAMPLING = type(GREEDY)(max_tokens=8, temperature=0.0, prompt_logprobs=40)


def make(path: Path, device: str, dtype: str) -> DeviceBackend:
    """A small backend of the tiny model."""
    return make_backend(model_dir=str(path), device=device, dtype=dtype, max_context_tokens=64)


def write_adapter(backend: DeviceBackend, path: Path, rank: int, seed: int) -> Manifest:
    """Weights at every site."""
    schema = LoraSchema.from_json(backend.info.lora_schema)
    sites = [random_site(s, rank, scales=(0.3,), seed=seed + i) for i, s in enumerate(schema.sites)]
    return write_payload(path, schema, backend.info.base_digest, sites, PayloadDtype.FLOAT32)


def load(backend: DeviceBackend, path: Path, rank: int, slot: int) -> None:
    """Write, read, copy, wait."""
    manifest = write_adapter(backend, path, rank, 100 * slot)
    backend.host_pool.read(manifest, str(path))
    assert backend.arena.begin_copy(manifest.digest, slot)
    while slot not in backend.arena.poll():
        pass


def differences(ours: list[Driven], theirs: list[Driven]) -> list[float]:
    """Absolute differences of all prompt log-probabilities."""
    return sorted(
        abs(a.logprob - b.logprob)
        for x, y in zip(ours, theirs, strict=True)
        for a, b in zip(x.prompt_logprobs, y.prompt_logprobs, strict=True)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_the_cpu_backend(tmp_path: Path, dtype: str) -> None:
    """Base and two adapters in one batch, prompts in chunks."""
    path = write_model(tmp_path / "model", **FIELDS)
    requests = [DrivenRequest(PROMPT, slot, SAMPLING) for slot in (-1, 0, 1)]
    results: list[list[Driven]] = []
    for device, kind in (("cpu", "float32"), ("cuda", dtype)):
        backend = make(path, device, kind)
        for slot, rank in ((0, 4), (1, 11)):
            load(backend, tmp_path / f"{device}{slot}", rank, slot)
        results.append(drive(backend, requests, num_tokens=8, chunk=7))
    found = differences(*results)
    assert found[len(found) // 2] < (1e-3 if dtype == "float32" else 0.15)
    if dtype == "float32":
        assert found[-1] < 2e-2
        assert [r.token_ids for r in results[0]] == [r.token_ids for r in results[1]]


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_a_cache_in_fp8_equals_the_cpus(tmp_path: Path, scale: float) -> None:
    """Values that fall to the neighbouring FP8 number on one device alone are few."""
    names = [f"model.layers.{n}.self_attn.{kind}_scale" for n in range(3) for kind in "kv"]
    weights = make_weights(CONFIG | FIELDS) | {name: np.array(scale, np.float32) for name in names}
    path = write_model(tmp_path / "model", weights, **FIELDS)
    results = []
    for device in ("cpu", "cuda"):
        backend = make_backend(
            model_dir=str(path), device=device, dtype="float32", max_context_tokens=64, kv_cache_dtype="fp8"
        )
        results.append(drive(backend, [DrivenRequest(PROMPT, -1, SAMPLING)], num_tokens=8, chunk=7))
        assert backend.compilations() == 0
    found = differences(*results)
    assert found[len(found) // 2] < 1e-3
    assert found[-1] < 0.1


def test_copy_waits_for_steps_in_flight(tmp_path: Path) -> None:
    """Bytes handed out again are not overwritten while work enqueued before still reads them."""
    backend = make(write_model(tmp_path / "model", **FIELDS), "cuda", "float32")
    manifest = write_adapter(backend, tmp_path / "p", 8, 0)
    backend.host_pool.read(manifest, str(tmp_path / "p"))
    adapter = backend.host_pool.get(manifest.digest)  # pyright: ignore[reportAttributeAccessIssue]
    assert all(layer.is_pinned() for layer in adapter.layers)
    target = torch.zeros(adapter.layout.num_bytes, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda._sleep(200_000_000)
    seen = target.clone()  # runs after the sleep, before the copy
    copy = CudaCopy(adapter, target, stream)
    assert not copy.advance()
    torch.cuda.synchronize()
    assert copy.advance()
    assert not seen.any()
    assert torch.equal(target.cpu(), torch.cat(adapter.layers))
