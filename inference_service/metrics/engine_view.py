"""The engine as the last look at it found it."""

import time
from dataclasses import dataclass, field

from inference_service.domain.engine_report import EngineReport
from inference_service.domain.errors import EngineDeadError
from inference_service.metrics.engine_totals import EngineTotals, LifetimeTotals
from inference_service.ports import Engine


@dataclass(frozen=True, slots=True)
class EngineView:
    """One look. While the engine is away its report is all zero, and the totals stay what they were."""

    is_up: bool = False
    report: EngineReport = field(default_factory=EngineReport)
    totals: EngineTotals = field(default_factory=lambda: EngineTotals.of(EngineReport()))
    num_restarts: int = 0
    seen_unix_s: float = 0.0


class EngineWatch:
    """Looks at the engine. Runs on its event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._totals = LifetimeTotals()

    async def look(self) -> EngineView:
        """Ask the engine; one that is busy answers after its step."""
        try:
            report = await self._engine.report()
        except EngineDeadError:
            report = EngineReport()
        is_up = self._engine.is_alive
        totals = self._totals.take(self._engine.instance_id, report) if is_up else self._totals.sums()
        return EngineView(
            is_up, report if is_up else EngineReport(), totals, self._engine.num_restarts, time.time()
        )
