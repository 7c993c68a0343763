"""Collections of cyclic garbage between steps, when the engine loop chooses: none falls into a step.

Python would collect whenever enough objects were made: in the middle of a step, and now and then over all
that the process holds. The loop's own objects form no cycles, so there is little to find.
"""

import gc
import time
from collections.abc import Callable

# Objects with references made since the last collection and still there. That many take about 0.1 ms.
_YOUNG_OBJECTS = 5_000
# A busy loop looks at all that was made since the start this often; an idle one whenever it is idle.
_WHOLE_EVERY_S = 60.0


class StepCollector:
    """Owns Python's collector once `take_over` was called. One caller: the engine process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._whole_s = clock()
        self._has_collected = False

    def take_over(self) -> None:
        """No automatic collection from now on; what is there (the model, modules) is not looked at again."""
        gc.collect()
        gc.freeze()
        gc.disable()
        self._whole_s = self._clock()

    def give_back(self) -> None:
        """Leave the collector as Python had it."""
        gc.enable()
        gc.unfreeze()

    def between_steps(self) -> None:
        """Collect what is young if it is much; rarely everything."""
        if gc.get_count()[0] < _YOUNG_OBJECTS:
            return
        if self._clock() - self._whole_s < _WHOLE_EVERY_S:
            gc.collect(1)
            self._has_collected = True
        else:
            self._collect_all()

    def while_idle(self) -> None:
        """Collect everything, if anything was made since."""
        if self._has_collected or gc.get_count()[0] >= _YOUNG_OBJECTS // 10:
            self._collect_all()

    def _collect_all(self) -> None:
        gc.collect()
        self._whole_s = self._clock()
        self._has_collected = False
