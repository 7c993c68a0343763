"""Random requests through the real scheduler and a model runner, with and without steps that overlap."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inference_service.domain.request import EngineRequest, FinishReason, RequestFinish, TokenLogprobs
from inference_service.domain.sampling import SamplingParams
from inference_service.domain.step import SchedulerOutput
from inference_service.engine.step_pipeline import StepPipeline
from inference_service.execution.model_runner import BatchModelRunner
from inference_service.scheduler.scheduler import Scheduler
from tests.support.engine_builders import OpenGate, make_scheduler_config

TURN_S = 0.01


class SlotGate(OpenGate):
    """Every adapter is on the device, in the slot that its digest names."""

    def acquire(self, digest: str, request_id: str, now_s: float) -> int:
        """Take a lease."""
        super().acquire(digest, request_id, now_s)
        return int(digest)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes at a turn of the loop, and may be aborted at a later one."""

    turn: int
    request: EngineRequest
    abort_turn: int | None


@dataclass(slots=True)
class Outcome:
    """All that a request's consumer got."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish: RequestFinish | None = None

    @property
    def is_cut_off(self) -> bool:
        """Whether it ended at a moment rather than at a token."""
        assert self.finish is not None
        return self.finish.reason in (FinishReason.ABORTED, FinishReason.DEADLINE)


def random_sampling(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Everything that a request may ask of the sampler, each now and then."""

    def some(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(rng.randrange(low, high)))

    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.35 else default

    return SamplingParams(
        max_tokens=rng.randrange(1, 30),
        temperature=rng.choice([0.0, 0.7, 1.4]),
        top_k=maybe(rng.randrange(1, 20), 0),
        top_p=maybe(0.8, 1.0),
        min_p=maybe(0.05, 0.0),
        seed=rng.getrandbits(64),
        stop_token_ids=maybe(some(1, 4), ()),
        logprobs=maybe(rng.randrange(3), None),
        prompt_logprobs=maybe(rng.randrange(2), None),
        presence_penalty=maybe(0.8, 0.0),
        frequency_penalty=maybe(0.4, 0.0),
        repetition_penalty=maybe(1.3, 1.0),
        logit_bias=maybe(tuple((token, 3.0) for token in set(some(1, 5))), ()),
        min_tokens=maybe(rng.randrange(1, 12), 0),
        held_back_token_ids=some(0, 4),
        bad_words=maybe(tuple(some(1, 4) for _ in range(8)), ()),
    )


def random_arrivals(
    rng: random.Random, count: int, *, vocab_size: int, num_slots: int, longest: int = 60
) -> list[Arrival]:
    """Requests of the base and of adapters; some share a beginning, some have deadlines or are aborted."""
    families = [[rng.randrange(vocab_size) for _ in range(longest)] for _ in range(3)]
    arrivals: list[Arrival] = []
    for index in range(count):
        turn = rng.randrange(60)
        shared = rng.choice(families)[: rng.randrange(longest // 2)]
        prompt = (*shared, *(rng.randrange(vocab_size) for _ in range(rng.randrange(1, longest // 2))))
        request = EngineRequest(
            request_id=f"r{index}",
            tenant=f"t{index % 3}",
            prompt_token_ids=prompt,
            sampling=random_sampling(rng, vocab_size),
            digest=rng.choice([None, *(str(slot) for slot in range(num_slots))]),
            deadline_s=(turn + rng.randrange(1, 40)) * TURN_S if rng.random() < 0.12 else None,
        )
        abort_turn = turn + rng.randrange(30) if rng.random() < 0.15 else None
        arrivals.append(Arrival(turn, request, abort_turn))
    return arrivals


def run_workload(
    runner: BatchModelRunner, arrivals: Sequence[Arrival], *, overlaps: bool, **scheduler: int
) -> tuple[dict[str, Outcome], Scheduler]:
    """Turn the pipeline until all have ended; every request's outcome, and the scheduler as it was left."""
    turn = 0
    gate = SlotGate()
    machine = Scheduler(make_scheduler_config(**scheduler), gate)
    pipeline = StepPipeline(
        machine, runner, overlaps=overlaps, on_step=lambda step: None, clock=lambda: turn * TURN_S
    )
    outcomes = {arrival.request.request_id: Outcome() for arrival in arrivals}
    while any(outcome.finish is None for outcome in outcomes.values()):
        for arrival in arrivals:
            if arrival.turn == turn:
                machine.add(arrival.request, turn * TURN_S)
            if arrival.abort_turn == turn:
                machine.abort(arrival.request.request_id, turn * TURN_S)
        pipeline.turn()
        for output in machine.take_outputs():
            outcome = outcomes[output.request_id]
            assert outcome.finish is None, f"{output.request_id} goes on after its end"
            outcome.token_ids += output.token_ids
            outcome.logprobs += output.logprobs
            outcome.prompt_logprobs = outcome.prompt_logprobs or output.prompt_logprobs
            outcome.finish = output.finish
        turn += 1
        assert turn < 5000, "requests are left"
    while pipeline.turn():
        pass
    assert not gate.leases
    # Nothing will be scheduled any more that could tell the runner who has left.
    runner.execute(SchedulerOutput(0, (), finished=tuple(outcomes)))
    return outcomes, machine
