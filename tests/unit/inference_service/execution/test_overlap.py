"""Steps that overlap, and steps brought to fixed shapes, bring what single steps bring: token for token."""

import random
from itertools import pairwise
from pathlib import Path

import pytest

from inference_service.domain.request import EngineRequest, TokenLogprobs
from inference_service.domain.sampling import SamplingParams
from inference_service.execution.backend import DeviceBackend
from tests.support.random_adapters import activate_random
from tests.support.runner import make_backend
from tests.support.tiny_model import CONFIG, write_model
from tests.support.workload import Arrival, Outcome, random_arrivals, run_workload

NUM_BLOCKS = 15
SCHEDULER = {"block_tokens": 8, "num_blocks": NUM_BLOCKS, "max_step_tokens": 24, "max_running_requests": 7}
# Odd sizes, so that most batches are filled up, and larger ones than the last run without a fixed shape.
WAYS = {
    "overlapping": {"overlaps": True},
    "fixed": {"overlaps": False, "sizes": (1, 3, 6), "counts": (9, 13, 21)},
    "overlapping and fixed": {"overlaps": True, "sizes": (1, 3, 6), "counts": (24,)},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny model for all."""
    return write_model(tmp_path_factory.mktemp("model"))


def backend_of(model: Path, sizes: tuple[int, ...] = (), counts: tuple[int, ...] = ()) -> DeviceBackend:
    """The answers must not depend on the batch: then every way has to give the same bits."""
    backend = make_backend(
        model_dir=str(model),
        batch_invariant=True,
        block_tokens=8,
        num_blocks=NUM_BLOCKS,
        max_context_tokens=100,
        max_running_requests=7,
        max_step_tokens=24,
        graph_batch_sizes=sizes,
        graph_token_counts=counts,
    )
    for slot in (0, 1):
        activate_random(backend, model.parent / f"adapter{slot}", slot, rank=4 + slot)
    return backend


def close(ours: TokenLogprobs | None, theirs: TokenLogprobs | None) -> bool:
    """Equal up to the order of additions."""
    if ours is None or theirs is None:
        return ours is theirs
    return ours.logprob == pytest.approx(theirs.logprob, abs=1e-5) and len(ours.top_ids) == len(
        theirs.top_ids
    )


def check(ours: Outcome, theirs: Outcome, arrival: Arrival) -> None:
    """The same tokens; where a moment ended a request, as far as both came."""
    both = min(len(ours.token_ids), len(theirs.token_ids))
    assert ours.token_ids[:both] == theirs.token_ids[:both], arrival
    pairs = list(zip(ours.logprobs, theirs.logprobs, strict=False))
    if ours.prompt_logprobs and theirs.prompt_logprobs:
        pairs += zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True)
    assert all(close(a, b) for a, b in pairs)
    if not (ours.is_cut_off or theirs.is_cut_off):
        assert ours.finish is not None
        assert theirs.finish is not None
        assert len(ours.token_ids) == len(theirs.token_ids)
        assert (ours.finish.reason, ours.finish.stop_token_id) == (
            theirs.finish.reason,
            theirs.finish.stop_token_id,
        )
        assert bool(ours.prompt_logprobs) == bool(theirs.prompt_logprobs)


@pytest.mark.timeout(900)  # a loaded machine takes ten times as long
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 8), marks=pytest.mark.long)])
def test_every_way_brings_the_same_tokens(model: Path, seeds: range) -> None:
    """With adapters, preemption, aborts, deadlines, stop tokens, every parameter; all is given back."""
    plain = backend_of(model)
    others = {
        name: (backend_of(model, way.get("sizes", ()), way.get("counts", ())), way["overlaps"])
        for name, way in WAYS.items()
    }
    seen: set[str] = set()
    preemptions = 0
    for seed in seeds:
        rng = random.Random(seed)
        arrivals = random_arrivals(rng, 30, vocab_size=CONFIG["vocab_size"], num_slots=2)
        expected, scheduler = run_workload(plain.runner, arrivals, overlaps=False, **SCHEDULER)
        preemptions += scheduler.stats().preemptions
        seen |= {outcome.finish.reason.name for outcome in expected.values() if outcome.finish}
        for name, (backend, overlaps) in others.items():
            found, scheduler = run_workload(backend.runner, arrivals, overlaps=overlaps, **SCHEDULER)
            for arrival in arrivals:
                request_id = arrival.request.request_id
                check(found[request_id], expected[request_id], arrival)
            stats = scheduler.stats()
            assert (stats.running_requests, stats.blocks_available) == (0, NUM_BLOCKS), name
    assert preemptions
    assert seen == {"LENGTH", "STOP_TOKEN", "ABORTED", "DEADLINE"}


def greedy(**changes: object) -> Arrival:
    """One request of the base model."""
    sampling = SamplingParams(max_tokens=12, temperature=0.0, **changes)  # type: ignore[arg-type]
    return Arrival(0, EngineRequest("r", "t", (3, 17, 8), sampling), None)


@pytest.mark.parametrize("sizes", [(), (4,)])
def test_a_bad_word_is_known_though_its_first_token_was_just_sampled(
    model: Path, sizes: tuple[int, ...]
) -> None:
    """The token that would complete one is masked in the very next step, whatever is in flight."""
    backend = backend_of(model, sizes, (8,) if sizes else ())

    def tokens(*, overlaps: bool, **changes: object) -> list[int]:
        outcomes, _ = run_workload(backend.runner, [greedy(**changes)], overlaps=overlaps, **SCHEDULER)
        return outcomes["r"].token_ids

    free = tokens(overlaps=True)
    assert free == tokens(overlaps=False)
    for index in range(len(free) - 1):
        word = (free[index], free[index + 1])
        held = tokens(overlaps=True, bad_words=(word,))
        assert word not in list(pairwise(held))
        assert held == tokens(overlaps=False, bad_words=(word,))
