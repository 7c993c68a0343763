"""Continuous batching on fakes: what is scheduled, in which order, and how requests end."""

from dataclasses import replace

import pytest

from inference_service.domain.request import FinishReason
from inference_service.domain.step import ModelRunnerOutput, SchedulerOutput
from inference_service.domain.tenant import TenantShare
from inference_service.scheduler.scheduler import Scheduler
from tests.support.engine_builders import OpenGate, Rig, make_request, make_scheduler_config
from tests.support.fake_device import expected_tokens


def test_tokens_of_a_request_are_the_models() -> None:
    """One request, alone: its tokens, its length, its usage."""
    rig = Rig()
    rig.add(make_request("a", (5, 6, 7), max_tokens=9))
    rig.run()
    assert rig.tokens("a") == expected_tokens(None, (5, 6, 7), 9)
    end = rig.finish("a")
    assert (end.reason, end.prompt_tokens, end.output_tokens) == (FinishReason.LENGTH, 3, 9)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 31, 32, 33, 100])
def test_long_prompts_are_cut_to_the_token_budget(length: int) -> None:
    """No step exceeds the budget; the outcome is the same as without chunks."""
    rig = Rig()
    prompt = tuple(range(length))
    rig.add(make_request("a", prompt))
    rig.run()
    assert rig.tokens("a") == expected_tokens(None, prompt, 4)
    assert max(step.num_tokens for step in rig.runner.steps) <= 32


def test_decodes_come_before_a_new_prompt() -> None:
    """A long prompt takes what running requests leave, and none of them misses a step."""
    rig = Rig()
    rig.add(make_request("a", (1,), max_tokens=8))
    rig.turn()
    rig.add(make_request("b", range(100)))
    for _ in range(4):
        rig.turn()
    shares = [{s.request_id: s.num_scheduled_tokens for s in step.scheduled} for step in rig.runner.steps[1:]]
    assert shares == [{"a": 1, "b": 31}, {"a": 1, "b": 31}, {"a": 1, "b": 31}, {"a": 1, "b": 7}]


def test_stop_token_ends_a_request_and_is_reported() -> None:
    """The stop token is the last token of the output."""
    wanted = expected_tokens(None, (1, 2), 6)
    rig = Rig()
    rig.add(make_request("a", (1, 2), max_tokens=20, stop_token_ids=(wanted[3],)))
    rig.run()
    end = rig.finish("a")
    assert rig.tokens("a") == wanted[:4]
    assert (end.reason, end.stop_token_id) == (FinishReason.STOP_TOKEN, wanted[3])


def test_context_limit_ends_a_request() -> None:
    """Prompt and output together never exceed the context."""
    rig = Rig(max_context_tokens=10)
    rig.add(make_request("a", range(6), max_tokens=50))
    rig.run()
    assert len(rig.tokens("a")) == 4
    assert rig.finish("a").reason is FinishReason.LENGTH


def test_no_output_tokens_wanted() -> None:
    """max_tokens 0 computes the prompt and returns its log-probabilities alone."""
    rig = Rig()
    rig.add(make_request("a", range(6), max_tokens=0, prompt_logprobs=0))
    rig.run()
    assert rig.tokens("a") == []
    assert len(rig.outputs["a"][-1].prompt_logprobs) == 6


@pytest.mark.parametrize(
    ("request_", "reason", "words"),
    [
        (make_request("x", ()), "INVALID_REQUEST", "no tokens"),
        (make_request("x", range(200)), "LIMIT_EXCEEDED", "max_context_tokens"),
        (make_request("x", range(90), max_tokens=50), "LIMIT_EXCEEDED", "kv_cache_tokens"),
        (make_request("busy"), "DUPLICATE_REQUEST", "busy"),
    ],
)
def test_requests_that_can_never_run_are_refused_at_once(request_: object, reason: str, words: str) -> None:
    """The error names the limit; nothing is left behind."""
    rig = Rig(num_blocks=32)
    rig.add(make_request("busy", max_tokens=100))
    rig.turn()
    before = rig.scheduler.stats()
    rig.add(request_)  # type: ignore[arg-type]
    (output,) = rig.scheduler.take_outputs()
    assert output.finish is not None
    assert output.finish.reason is FinishReason.FAILED
    assert output.finish.error_reason == reason
    assert words in output.finish.error_message
    if reason == "LIMIT_EXCEEDED":
        metadata = dict(output.finish.error_metadata)
        assert (metadata["field"], metadata["limit"]) == ("input", words)
        assert int(metadata["value"]) > int(metadata["maximum"])
    assert rig.scheduler.stats() == before


def test_request_of_exactly_the_whole_cache_runs() -> None:
    """The last token needs no room: 128 places, 100 prompt and 29 output tokens."""
    rig = Rig(num_blocks=32)
    rig.add(make_request("a", range(100), max_tokens=29))
    rig.run()
    assert len(rig.tokens("a")) == 29


def test_queue_is_full_when_no_place_is_left() -> None:
    """Requests that can run at once do not fill the queue."""
    rig = Rig(max_running_requests=2, max_waiting_requests=3)
    for index in range(6):
        rig.add(make_request(f"r{index}"))
    (refused,) = rig.scheduler.take_outputs()
    assert refused.request_id == "r5"
    assert refused.finish is not None
    assert refused.finish.error_reason == "QUEUE_FULL"
    rig.run()
    assert all(rig.finish(f"r{index}").reason is FinishReason.LENGTH for index in range(5))


def test_tenant_limits_bind_that_tenant_only() -> None:
    """One running and one waiting for the small tenant; the other is not touched."""
    rig = Rig()
    rig.scheduler.set_tenants([TenantShare("small", 1.0, max_running_requests=1, max_waiting_requests=1)])
    for index in range(3):
        rig.add(make_request(f"s{index}", tenant="small"))
        rig.add(make_request(f"l{index}", tenant="large"))
    (refused,) = rig.scheduler.take_outputs()
    assert refused.request_id == "s2"
    rig.turn()
    assert {s.request_id for s in rig.runner.steps[0].scheduled} == {"s0", "l0", "l1", "l2"}
    rig.run()


def test_expired_request_is_never_prefilled() -> None:
    """Queued behind a full house, it ends with DEADLINE and no step holds it."""
    rig = Rig(max_running_requests=1)
    rig.add(make_request("a", max_tokens=50))
    rig.turn()
    rig.add(make_request("b", deadline_s=rig.now_s + 0.1))
    rig.add(make_request("late", deadline_s=rig.now_s - 1))
    rig.turn(seconds=0.2)
    rig.run()
    assert rig.finish("b").reason is FinishReason.DEADLINE
    assert rig.finish("late").reason is FinishReason.DEADLINE
    seen = {s.request_id for step in rig.runner.steps for s in step.scheduled}
    assert seen == {"a"}


def test_running_request_stops_at_its_deadline_and_leaves_nothing() -> None:
    """What was streamed stays; its blocks are available again at the next step."""
    rig = Rig()
    rig.add(make_request("a", max_tokens=100, deadline_s=rig.now_s + 0.05))
    for _ in range(5):
        rig.turn()
    rig.turn(seconds=0.1)
    assert rig.finish("a").reason is FinishReason.DEADLINE
    assert rig.finish("a").output_tokens == len(rig.tokens("a")) == 5
    assert rig.scheduler.stats().blocks_available == 64
    assert rig.scheduler.next_deadline_s() is None


def test_abort_in_each_phase_and_twice() -> None:
    """Waiting, in prefill, decoding: one end each, everything back; a second abort is nothing."""
    rig = Rig(max_running_requests=2, max_step_tokens=8)
    rig.add(make_request("decode", max_tokens=50))
    rig.turn()
    rig.add(make_request("prefill", range(40)))
    rig.turn()
    rig.add(make_request("waiting"))
    rig.turn()
    for request_id in ("waiting", "prefill", "decode", "decode", "never"):
        rig.abort(request_id)
    rig.turn()
    assert all(rig.finish(r).reason is FinishReason.ABORTED for r in ("waiting", "prefill", "decode"))
    stats = rig.scheduler.stats()
    assert (stats.running_requests, stats.waiting_requests, stats.blocks_available) == (0, 0, 64)


def test_preempted_request_ends_with_the_same_tokens() -> None:
    """Too few blocks for all: some are computed anew, none is lost, none differs."""
    rig = Rig(num_blocks=12, prefix_cache=False)
    prompts = {f"r{i}": (i, i + 1, i + 2) for i in range(6)}
    for request_id, prompt in prompts.items():
        rig.add(make_request(request_id, prompt, max_tokens=20))
    rig.run()
    assert rig.scheduler.stats().preemptions > 0
    for request_id, prompt in prompts.items():
        assert rig.tokens(request_id) == expected_tokens(None, prompt, 20)
    assert rig.scheduler.stats().blocks_available == 12


def test_oldest_request_is_never_preempted() -> None:
    """The newest gives way, so the oldest moves on in every step."""
    rig = Rig(num_blocks=8, prefix_cache=False)
    rig.add(make_request("old", max_tokens=25))
    rig.turn()
    for index in range(4):
        rig.add(make_request(f"new{index}", max_tokens=25))
    for _ in range(24):
        rig.turn()
    assert rig.finish("old").reason is FinishReason.LENGTH


def test_prompt_logprobs_come_whole_and_once() -> None:
    """Over several chunks, with a preemption-free run: position 0 is None, the rest in order."""
    rig = Rig(max_step_tokens=7)
    prompt = tuple(range(100, 120))
    rig.add(make_request("a", prompt, max_tokens=3, prompt_logprobs=0, logprobs=0))
    rig.run()
    first, *others = rig.outputs["a"]
    assert [e and e.logprob for e in first.prompt_logprobs] == [None, *(-t / 1000 for t in prompt[1:])]
    assert all(not output.prompt_logprobs for output in others)
    assert all(len(output.logprobs) == len(output.token_ids) == 1 for output in rig.outputs["a"])


def test_prompt_logprobs_survive_preemption() -> None:
    """Requests preempted before or after their first token still tell their prompt's once, whole."""
    rig = Rig(num_blocks=13, max_step_tokens=6)
    for index in range(4):
        rig.add(make_request(f"r{index}", range(index, index + 9), max_tokens=12, prompt_logprobs=0))
    rig.run()
    assert rig.scheduler.stats().preemptions > 0
    for index in range(4):
        told = [output.prompt_logprobs for output in rig.outputs[f"r{index}"] if output.prompt_logprobs]
        assert [[e and e.logprob for e in whole] for whole in told] == [
            [None, *(-t / 1000 for t in range(index + 1, index + 9))]
        ]


def test_timings_add_up() -> None:
    """Queue, prefill and decode are told apart."""
    rig = Rig(max_running_requests=1)
    rig.add(make_request("a", max_tokens=3))
    rig.add(make_request("b", range(40), max_tokens=2))
    start_s = rig.now_s
    rig.run()
    timings = rig.finish("b").timings
    assert timings.queue_ms == pytest.approx(4)
    assert timings.prefill_ms == pytest.approx(1)
    assert timings.decode_ms == pytest.approx(1)
    assert rig.now_s - start_s == pytest.approx(0.006)


@pytest.mark.parametrize(("num_blocks", "depth"), [(64, 1), (12, 1), (12, 2), (12, 4)])
def test_next_step_can_be_scheduled_before_the_last_ones_result(num_blocks: int, depth: int) -> None:
    """Steps in flight give the same tokens, preempted or not; no request gets more than it asked for.

    At a depth of more than one a request is back from preemption before its earlier life's results are in.
    """
    rig = Rig()
    config = make_scheduler_config(num_blocks=num_blocks, max_running_requests=5, prefix_cache=False)
    scheduler = Scheduler(config, OpenGate())
    for index in range(6):
        scheduler.add(make_request(f"r{index}", range(index, index + 3), max_tokens=17 + index), 0.0)
    in_flight = []
    tokens: dict[str, list[int]] = {}
    for turn in range(200):
        step = scheduler.schedule(turn)
        if step.scheduled:
            in_flight.append(rig.runner.execute(step))
        if len(in_flight) > depth or (in_flight and not step.scheduled):
            scheduler.update(in_flight.pop(0), turn)
        for output in scheduler.take_outputs():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert tokens == {
        f"r{index}": expected_tokens(None, range(index, index + 3), 17 + index) for index in range(6)
    }
    assert (scheduler.stats().preemptions > 0) is (num_blocks == 12)
    assert scheduler.stats().blocks_available == num_blocks


def test_logits_that_are_not_finite_fail_their_request_alone() -> None:
    """A negative token id is no token: the request ends with the reason, its blocks and lease come back."""
    rig = Rig()
    execute = rig.runner.execute

    def poisoned(step: SchedulerOutput) -> ModelRunnerOutput:
        output = execute(step)
        return ModelRunnerOutput(
            output.step,
            tuple(replace(r, token_ids=(-1,)) if r.request_id == "a" else r for r in output.results),
        )

    rig.runner.execute = poisoned  # type: ignore[method-assign]
    rig.add(make_request("a", (1, 2), max_tokens=9))
    rig.add(make_request("b", (1, 2), max_tokens=4))
    rig.run()
    assert (rig.finish("a").reason, rig.finish("a").error_reason) == (
        FinishReason.FAILED,
        "LOGITS_NOT_FINITE",
    )
    assert rig.tokens("a") == []
    assert rig.tokens("b") == expected_tokens(None, (1, 2), 4)
    assert rig.scheduler.stats().running_requests == 0
    assert rig.scheduler.stats().blocks_available == rig.config.num_blocks
