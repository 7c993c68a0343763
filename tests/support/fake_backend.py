"""A backend factory for the real engine process: no model, the fake device, knobs in `model_dir`.

`model_dir` is a query string, e.g. "step_s=0.002&read_s=0.01". A prompt that holds DEADLY_TOKEN kills the
process in its first step, as a fault of the device would. Where a request of several samples has BLIND_TOKEN
in its prompt, the logits of those beside the first are not finite.
"""

import os
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl

from inference_service.domain.engine import ModelFacts
from inference_service.domain.step import ModelRunnerOutput, SchedulerOutput
from inference_service.execution.config import BackendConfig
from tests.support.fake_device import VOCAB_SIZE, FakeArena, FakeHostPool, FakeRunner

FACTORY = "tests.support.fake_backend:make_backend"
DEADLY_TOKEN = 666
FAULTY_TOKEN = 667
BLIND_TOKEN = 668


class MortalRunner(FakeRunner):
    """Dies, or raises, on a token."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """See FakeRunner."""
        self.steps.clear()
        for new in step.new:
            if DEADLY_TOKEN in new.token_ids:
                os._exit(77)
            if FAULTY_TOKEN in new.token_ids:
                raise RuntimeError("the device fell off the bus")
        done = super().execute(step)
        results = tuple(
            replace(result, token_ids=(-1,))
            if "/" in share.request_id and BLIND_TOKEN in self._held[share.request_id].token_ids
            else result
            for share, result in zip(step.scheduled, done.results, strict=True)
        )
        return replace(done, results=results)


@dataclass(frozen=True)
class FakeBackend:
    """Satisfies ports.Backend."""

    info: ModelFacts
    runner: MortalRunner
    host_pool: FakeHostPool
    arena: FakeArena

    def compilations(self) -> int:
        """Nothing is compiled."""
        return 0


def make_backend(config: BackendConfig) -> FakeBackend:
    """The factory; `EngineConfig.backend_factory` names it."""
    knobs = {key: float(value) for key, value in parse_qsl(config.model_dir)}
    if "fail" in knobs:
        raise ValueError("the model directory is empty")
    pool = FakeHostPool(config.host_pool_bytes or 0)
    pool.read_s = knobs.get("read_s", 0.0)
    arena = FakeArena(pool, config.num_slots, config.arena_bytes or 0, polls_per_copy=2)
    info = ModelFacts(
        model_name="fake",
        architecture="FakeForCausalLM",
        base_digest="0" * 64,
        dtype=config.dtype,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        lora_schema=b"{}",
        max_context_tokens=config.max_context_tokens or 1000,
        num_blocks=config.num_blocks or 256,
        start_phases=(("weights", 1.5),),
    )
    runner = MortalRunner(arena, config.block_tokens, config.max_running_requests, knobs.get("step_s", 0.0))
    return FakeBackend(info, runner, pool, arena)
