"""The runner against the golden outputs of transformers and peft: base and every adapter meant to load."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from inference_service.domain.sampling import SamplingParams
from inference_service.execution.backend import DeviceBackend
from tests.support.golden import CHECKER, FIXTURES, GOLDEN_MODELS, GoldenModel, prompts
from tests.support.ingested import activate
from tests.support.runner import GREEDY, Driven, DrivenRequest, drive, make_backend

CASES = [
    pytest.param(model, adapter, id=f"{model.name}-{adapter['name']}")
    for model in GOLDEN_MODELS
    for adapter in model.adapters()
]


@pytest.fixture(scope="module", params=GOLDEN_MODELS, ids=lambda model: model.name)
def model(request: pytest.FixtureRequest) -> GoldenModel:
    """Each model in turn."""
    return request.param


@pytest.fixture(scope="module")
def backend(model: GoldenModel) -> DeviceBackend:
    """One backend of a model for all tests of the file."""
    return make_backend(model.name)


def whole(model: GoldenModel) -> SamplingParams:
    """Greedy, with the log-probabilities of the whole vocabulary."""
    return replace(GREEDY, logprobs=model.vocab_size)


def requests(model: GoldenModel, slot: int) -> list[DrivenRequest]:
    """The golden prompts; all positions of p33 are compared, the last one of the others."""
    sampling = whole(model)
    with_prompt = replace(sampling, prompt_logprobs=model.vocab_size)
    return [
        DrivenRequest(ids, slot, with_prompt if name == "p33" else sampling)
        for name, ids in prompts().items()
    ]


def log_softmax(x: np.ndarray) -> np.ndarray:
    """In float64."""
    y = x.astype(np.float64)
    return (y - np.logaddexp.reduce(y, axis=-1, keepdims=True)).astype(np.float32)


def check(golden: str, results: list[Driven]) -> None:
    """Assert that the checker finds nothing wrong; greedy near-ties are its to judge."""
    gold = {
        name: log_softmax(values)
        for name, values in load_file(FIXTURES / f"{golden}.safetensors").items()
        if not name.startswith("router_gap")
    }
    info = json.loads((FIXTURES / f"{golden}.json").read_text())
    found: dict[str, np.ndarray] = {}
    for name, result in zip(prompts(), results, strict=True):
        vocab_size = len(result.logprobs[0].top_ids)
        rows = np.zeros((len(result.prompt_logprobs) + 1, vocab_size), np.float32)
        for row, entry in zip(rows, [*result.prompt_logprobs, result.logprobs[0]], strict=True):
            row[list(entry.top_ids)] = entry.top_logprobs
        found[f"last.{name}"] = rows[-1]
        if len(rows) > 1:
            found[f"all.{name}"] = rows
    greedy = {"prompts": {n: {"greedy": r.token_ids} for n, r in zip(prompts(), results, strict=True)}}
    verdicts = CHECKER.compare(gold, info, found, greedy, "fp32")
    assert len(verdicts) == 9
    assert not [text for ok, text in verdicts if ok is False]


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 1 << 30])
def test_base(backend: DeviceBackend, model: GoldenModel, chunk: int) -> None:
    """The base model, its prompts in chunks of any size, over several blocks."""
    check(model.base, drive(backend, requests(model, -1), chunk=chunk))


@pytest.mark.parametrize(("model", "adapter"), CASES, indirect=["model"])
def test_adapter(backend: DeviceBackend, model: GoldenModel, adapter: dict[str, str], tmp_path: Path) -> None:
    """Each adapter alone."""
    activate(backend, f"{model.golden}/{adapter['name']}", 0, tmp_path)
    try:
        check(adapter["golden"], drive(backend, requests(model, 0), chunk=48))
    finally:
        backend.arena.release(0)


def test_mixed_batch_after_reload(backend: DeviceBackend, model: GoldenModel, tmp_path: Path) -> None:
    """Four adapters and the base in one batch; again after all moved to other slots and other bytes."""
    chosen = [a for a in model.adapters() if a["name"] in model.mixed]
    assert len(chosen) == 4
    for slots in ((0, 1, 2, 3), (2, 0, 3, 1)):
        for adapter, slot in zip(chosen, slots, strict=True):
            activate(backend, f"{model.golden}/{adapter['name']}", slot, tmp_path)
        batch = [request for slot in (*slots, -1) for request in requests(model, slot)]
        results = drive(backend, batch, chunk=40)
        for index, golden in enumerate([*(a["golden"] for a in chosen), model.base]):
            check(golden, results[4 * index : 4 * index + 4])
        for slot in slots:
            backend.arena.release(slot)
    assert backend.arena.used_bytes == 0


@pytest.mark.parametrize(
    "model", [m for m in GOLDEN_MODELS if m.is_always], indirect=True, ids=lambda m: m.name
)
def test_fixed_shapes(model: GoldenModel, tmp_path: Path) -> None:
    """Decode steps filled up to a size that they never have, base and adapters in one batch."""
    backend = make_backend(model.name, graph_batch_sizes=(11, 23))
    chosen = [a for a in model.adapters() if a["name"] in model.mixed[:2]]
    for slot, adapter in enumerate(chosen):
        activate(backend, f"{model.golden}/{adapter['name']}", slot, tmp_path)
    results = drive(backend, [request for slot in (0, -1, 1) for request in requests(model, slot)])
    goldens = (chosen[0]["golden"], model.base, chosen[1]["golden"])
    for index, golden in enumerate(goldens):
        check(golden, results[4 * index : 4 * index + 4])


def test_base_rows_keep_their_bits(backend: DeviceBackend, model: GoldenModel, tmp_path: Path) -> None:
    """Base requests in a batch of the same shape: bit-equal with adapters beside them and without.

    Router and expert adapters send the neighbours to other experts, so the experts' row counts change.
    """
    base = requests(model, -1)
    alone = drive(backend, base + requests(model, -1) + requests(model, -1), chunk=20)
    for slot, name in enumerate(model.mixed[:2]):
        activate(backend, f"{model.golden}/{name}", slot, tmp_path)
    beside = drive(backend, base + requests(model, 0) + requests(model, 1), chunk=20)
    assert beside[4].logprobs != alone[4].logprobs
    assert beside[:4] == alone[:4]
    backend.arena.release(0)
    backend.arena.release(1)


def test_batch_invariant(model: GoldenModel) -> None:
    """With the flag even the batch's size leaves every bit alone; the answers stay the golden ones."""
    backend = make_backend(model.name, batch_invariant=True)
    together = drive(backend, requests(model, -1))
    check(model.base, together)
    for index, request in enumerate(requests(model, -1)):
        alone = drive(backend, [request])[0]
        assert alone.token_ids == together[index].token_ids
        assert alone.logprobs == together[index].logprobs


def test_prefix_reuse(backend: DeviceBackend, model: GoldenModel) -> None:
    """Blocks that an earlier request computed serve a later one with the same beginning."""
    ids = prompts()["p130"]
    sampling = whole(model)
    first = drive(backend, [DrivenRequest(ids, sampling=sampling)])[0]
    reused = DrivenRequest(
        ids, sampling=sampling, num_cached=112, block_ids=(*first.block_ids[:7], *range(100, 103))
    )
    second = drive(backend, [reused])[0]
    assert second.token_ids == first.token_ids
    for ours, theirs in zip(second.logprobs, first.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
