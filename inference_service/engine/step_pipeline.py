"""The order of a step's parts: schedule, launch, collect, update; where steps overlap, one step ahead.

    without overlap   schedule n, launch n, collect n, update n, schedule n + 1, …
    with overlap      schedule n + 1, launch n + 1, collect n, update n, schedule n + 2, …

So a device that works by itself has the next step before it is done with the last. The scheduler needs no
token of a running request to schedule its next one, and what a step computed for a request that meanwhile
ended is dropped by `Scheduler.update`: its keys and values lie in blocks that a later step, in the device's
order, overwrites before it reads them.
"""

import time
from collections import deque
from collections.abc import Callable

from inference_service.domain.durations import Durations
from inference_service.domain.step import SchedulerOutput
from inference_service.ports import ModelRunner
from inference_service.scheduler.scheduler import Scheduler


class StepPipeline:
    """Turns steps. One caller: the engine loop.

    Args:
        scheduler: says what a step computes, and takes its results.
        runner: computes it.
        overlaps: launch a step before the one before it was collected.
        on_step: told of each step before its launch.
        clock: seconds, ever growing.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        overlaps: bool,
        on_step: Callable[[SchedulerOutput], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.durations = Durations()
        self._scheduler = scheduler
        self._runner = runner
        self._ahead = 1 if overlaps else 0
        self._on_step = on_step
        self._clock = clock
        self._begun_s: deque[float] = deque()
        self._last_ended_s = 0.0

    def turn(self) -> bool:
        """Launch a step, collect one, or both. False: there was neither, and nothing to wait for."""
        now_s = self._clock()
        step = self._scheduler.schedule(now_s)
        if step.scheduled:
            self._on_step(step)
            self._runner.launch(step)
            self._begun_s.append(now_s)
        if len(self._begun_s) > (self._ahead if step.scheduled else 0):
            self._collect()
            return True
        return bool(step.scheduled)

    def _collect(self) -> None:
        result = self._runner.collect()
        ended_s = self._clock()
        self._scheduler.update(result, ended_s)
        # The device began when it was done with the step before, if that was later than the launch.
        self.durations.add(ended_s - max(self._begun_s.popleft(), self._last_ended_s))
        self._last_ended_s = ended_s
