"""A backend whose steps somebody watches, for probes and profiles: runs in the engine process.

What watches is put around the runner from outside; an engine that nobody watches holds nothing of this.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from inference_service.domain.adapter import BASE_SLOT
from inference_service.domain.engine import ModelFacts
from inference_service.domain.step import SchedulerOutput
from inference_service.ports import Backend, DeviceArena, HostPool

# The engine process inherits it: which file to write to. Its settings have no room for what only benches ask.
TRACE_VARIABLE = "LORIKEET_BENCH_TRACE"


def trace_file() -> str:
    """Where the process that started this engine wants to read what was seen."""
    return os.environ[TRACE_VARIABLE]


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step in which every request computes one token; `slots` are the rows' LoRA slots, in their order."""

    slots: tuple[int, ...]


Watch = Callable[[DecodeStep | None], AbstractContextManager[None]]
"""Entered around each step; None stands for a step with prefill in it."""


class WatchedRunner:
    """Passes everything through to a runner, and enters `watch` around each call that is given a step."""

    def __init__(self, runner: Any, watch: Watch) -> None:
        self._runner = runner
        self._watch = watch
        self._slots: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._runner, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            step = next((value for value in arguments if isinstance(value, SchedulerOutput)), None)
            if step is None:
                return found(*arguments, **named)
            with self._watch(self._decode_step(step)):
                return found(*arguments, **named)

        return call

    def _decode_step(self, step: SchedulerOutput) -> DecodeStep | None:
        for request_id in step.finished:
            self._slots.pop(request_id, None)
        for new in step.new:
            self._slots[new.request_id] = new.slot
        is_decode = not step.new and all(one.num_scheduled_tokens == 1 for one in step.scheduled)
        if not is_decode or not step.scheduled:
            return None
        return DecodeStep(tuple(self._slots.get(one.request_id, BASE_SLOT) for one in step.scheduled))


@dataclass(frozen=True, slots=True)
class WatchedBackend:
    """A backend with another runner. Implements ports.Backend."""

    backend: Backend
    runner: Any

    @property
    def info(self) -> ModelFacts:
        """See ports.Backend."""
        return self.backend.info

    @property
    def host_pool(self) -> HostPool:
        """See ports.Backend."""
        return self.backend.host_pool

    @property
    def arena(self) -> DeviceArena:
        """See ports.Backend."""
        return self.backend.arena

    def compilations(self) -> int:
        """See ports.Backend."""
        return self.backend.compilations()

    def __getattr__(self, name: str) -> Any:
        # What a later Backend has and this one does not know; slots are looked up before this is asked.
        return getattr(self.backend, name)
