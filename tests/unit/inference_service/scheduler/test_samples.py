"""Several samples of one prompt: computed once, counted as requests each, ended each for itself."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from inference_service.domain.request import EngineRequest, FinishReason
from inference_service.domain.tenant import TenantShare
from tests.support.engine_builders import Rig, make_request, with_adapters
from tests.support.fake_device import expected_tokens

PROMPT = tuple(range(100, 145))  # 11 full blocks of 4, and one token more


def make_samples(
    count: int, request_id: str = "r", prompt: Sequence[int] = PROMPT, **more: Any
) -> EngineRequest:
    """A request of `count` samples."""
    return replace(make_request(request_id, prompt, **more), num_samples=count)


def sample_ids(count: int, request_id: str = "r") -> list[str]:
    """Their ids in the engine."""
    return [make_samples(count, request_id).sample_id(index) for index in range(count)]


def run_counting(rig: Rig) -> int:
    """Run to the end; the tokens of all steps."""
    total = 0
    while rig.scheduler.stats().running_requests or rig.scheduler.stats().waiting_requests:
        total += rig.turn()
    return total


def test_each_sample_is_the_request_of_its_seed() -> None:
    """Sample 0 is the request itself, sample i has seed + i, and the prompt's log-probabilities come once."""
    request = make_samples(3, seed=2**64 - 1, prompt_logprobs=2, temperature=0.5)
    first, second, third = request.samples()
    assert first == replace(request, num_samples=1)
    assert [s.sampling.seed for s in (second, third)] == [0, 1]
    assert [s.sampling.prompt_logprobs for s in (second, third)] == [None, None]
    assert len({s.request_id for s in (first, second, third)}) == 3
    assert {s.sampling.temperature for s in (first, second, third)} == {0.5}


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 4])
@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_the_prompt_is_computed_once(
    prefix_cache: bool, max_tokens: int, prompt_logprobs: int | None
) -> None:
    """Eight samples cost one prompt, and each the tail that no block holds; also where each ends at once."""
    rig = Rig(prefix_cache=prefix_cache, max_step_tokens=16)
    rig.add(make_samples(8, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs))
    # The last output token is never computed; a sample beside the first computes the prompt's last token.
    assert run_counting(rig) == len(PROMPT) + 7 + 8 * (max_tokens - 1)
    for sample_id in sample_ids(8):
        assert rig.tokens(sample_id) == expected_tokens(None, PROMPT, max_tokens)
    assert rig.scheduler.stats().prefix_hit_tokens == 7 * 44
    assert rig.scheduler.stats().blocks_available == rig.config.num_blocks
    assert sum(len(o.prompt_logprobs) for o in rig.outputs["r"]) == (45 if prompt_logprobs else 0)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 5])
def test_steps_that_overlap_share_as_much(prefix_cache: bool, max_tokens: int) -> None:
    """A step is scheduled before it is known that the prompt was computed: the others wait for that."""
    rig = Rig(prefix_cache=prefix_cache, max_step_tokens=16, overlaps=True)
    rig.add(make_samples(8, max_tokens=max_tokens))
    rig.run()
    for sample_id in sample_ids(8):
        assert rig.tokens(sample_id) == expected_tokens(None, PROMPT, max_tokens)
    assert rig.scheduler.stats().prefix_hit_tokens == 7 * 44
    assert rig.scheduler.stats().blocks_available == rig.config.num_blocks


def test_without_a_prefix_cache_nothing_is_shared_between_requests() -> None:
    """The samples' blocks are found by their own request alone."""
    rig = Rig(prefix_cache=False)
    for request_id in ("a", "b"):
        rig.add(make_samples(2, request_id))
        rig.run()
    rig.add(make_request("c", PROMPT))
    rig.run()
    assert rig.scheduler.stats().prefix_hit_tokens == 2 * 44


def test_others_run_while_samples_wait_for_their_prompt() -> None:
    """A waiting sample holds nobody behind it up."""
    rig = Rig(max_step_tokens=16)
    rig.add(make_samples(3))
    rig.add(make_request("other", (1, 2)))
    rig.turn()
    rig.turn()
    rig.turn()
    assert rig.scheduler.stats().running_requests >= 2
    rig.run()
    assert rig.tokens("other") == expected_tokens(None, (1, 2), 4)


@pytest.mark.parametrize("is_running", [True, False])
def test_another_takes_over_where_the_first_ends(is_running: bool) -> None:
    """Aborted before or in the middle of the prompt: the next one computes it, once for the rest."""
    rig = Rig(max_step_tokens=16)
    rig.add(make_samples(4))
    computed = rig.turn() if is_running else 0
    rig.abort("r")
    # Three samples go on from the blocks that were published, with a last prompt token each.
    assert run_counting(rig) == len(PROMPT) - computed // 4 * 4 + 2 + 3 * 3
    assert rig.finish("r").reason is FinishReason.ABORTED
    for sample_id in sample_ids(4)[1:]:
        assert rig.finish(sample_id).reason is FinishReason.LENGTH
        assert rig.tokens(sample_id) == expected_tokens(None, PROMPT, 4)


@pytest.mark.parametrize("overlaps", [False, True])
def test_preempted_samples_come_back_right(overlaps: bool) -> None:
    """Too few blocks for all: each still gives its tokens, and everything is given back."""
    rig = Rig(num_blocks=16, max_running_requests=4, overlaps=overlaps)
    rig.add(make_samples(4, prompt=PROMPT[:20], max_tokens=24))
    rig.run()
    assert rig.scheduler.stats().preemptions > 0
    for sample_id in sample_ids(4):
        assert rig.tokens(sample_id) == expected_tokens(None, PROMPT[:20], 24)
    assert rig.scheduler.stats().blocks_available == 16


def test_two_requests_of_samples_never_block_each_other() -> None:
    """A pool that holds either prompt but not both: no sample holds what another one waits for."""
    rig = Rig(num_blocks=14, max_running_requests=8)
    for request_id in ("a", "b"):
        rig.add(make_samples(3, request_id, prompt=[ord(request_id), *PROMPT[:39]], max_tokens=8))
    rig.run(max_turns=2000)
    for request_id in ("a", "b"):
        for sample_id in sample_ids(3, request_id):
            assert rig.finish(sample_id).reason is FinishReason.LENGTH


def test_samples_lease_their_adapter_each() -> None:
    """All wait for the load, all run on its slot, none keeps a lease."""
    rig, (digest,) = with_adapters(1)
    rig.add(make_samples(3, digest=digest))
    rig.run()
    for sample_id in sample_ids(3):
        assert rig.tokens(sample_id) == expected_tokens(digest, PROMPT, 4)
    assert rig.residency.stats().leases == 0


def test_a_deadline_ends_all_samples() -> None:
    """Those that wait and those that run, in one turn."""
    rig = Rig(max_running_requests=2)
    rig.add(make_samples(4, deadline_s=rig.now_s + 0.0035, max_tokens=100))
    rig.run()
    assert {rig.finish(i).reason for i in sample_ids(4)} == {FinishReason.DEADLINE}
    assert rig.scheduler.stats().blocks_available == rig.config.num_blocks


def test_a_tenant_pays_for_the_prompt_once() -> None:
    """In the fair order, too, the shared prompt counts once and each output token for itself."""
    rig = Rig()
    rig.add(make_samples(4))
    while not all(rig.outputs.get(i) for i in sample_ids(4)):
        rig.turn()
    # Prompt tokens cost 1, output tokens 2: the first tokens of the others came a step after sample 0's.
    counter = rig.scheduler._counters.counter("t")
    outputs = sum(max(0, len(rig.tokens(i)) - 1) for i in sample_ids(4))
    assert counter == len(PROMPT) + 3 + 2 * outputs


@pytest.mark.parametrize(
    ("share", "count", "reason"),
    [
        (None, 5, None),
        (None, 6, "LIMIT_EXCEEDED"),
        (TenantShare("t", max_running_requests=1, max_waiting_requests=2), 3, None),
        (TenantShare("t", max_running_requests=1, max_waiting_requests=2), 4, "LIMIT_EXCEEDED"),
        (TenantShare("t", max_waiting_requests=1), 3, None),
        (TenantShare("t", max_waiting_requests=1), 4, "LIMIT_EXCEEDED"),
    ],
)
def test_samples_count_against_the_limits(share: TenantShare | None, count: int, reason: str | None) -> None:
    """What could never be taken in is refused as that, by its field; nothing is half accepted."""
    rig = Rig(max_running_requests=2, max_waiting_requests=3)
    rig.scheduler.set_tenants([share] if share else [])
    rig.add(make_samples(count))
    stats = rig.scheduler.stats()
    assert stats.waiting_requests == (0 if reason else count)
    if reason:
        finish = rig.turn() or rig.finish("r")
        metadata = dict(finish.error_metadata)
        assert finish.error_reason == reason
        assert (metadata["field"], metadata["value"]) == ("sampling.n", str(count))
        assert metadata["maximum"] == str(count - 1)
        assert str(count) in finish.error_message
    rig.run()


def test_a_full_queue_takes_no_half_of_a_request() -> None:
    """Three places are left and four samples come: all are refused, to be tried again."""
    rig = Rig(max_running_requests=2, max_waiting_requests=3)
    rig.add(make_samples(2, "a"))
    rig.add(make_samples(4, "b"))
    rig.add(make_samples(3, "c"))
    rig.run()
    assert rig.finish("b").error_reason == "QUEUE_FULL"
    assert "4 samples" in rig.finish("b").error_message
    assert dict(rig.finish("b").error_metadata) == {
        "field": "request", "limit": "max_waiting_requests", "value": "6", "maximum": "5",
    }  # fmt: skip
    for sample_id in (*sample_ids(2, "a"), *sample_ids(3, "c")):
        assert rig.finish(sample_id).reason is FinishReason.LENGTH


def test_a_prompt_is_hashed_once_for_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample's keys go on from the prompt's; what each hashes are its own tokens."""
    hashed: list[int] = []
    sha256 = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda data: hashed.append(len(data)) or sha256(data))
    rig = Rig()
    rig.add(make_samples(8, max_tokens=2))
    rig.run()
    blocks = [size for size in hashed if size == 32 + 8 * 4]
    assert len(blocks) == 11
