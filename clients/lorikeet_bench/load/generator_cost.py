"""What the load generator itself costs: a generator that is late measures itself."""

import asyncio
import os
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_KNOCK_S = 0.005
# Above this the figures are the generator's as much as the server's.
WARN_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class GeneratorCost:
    """`cpu_share` is of all of the machine's cores, `cpu_cores` in cores.

    `lag_ms` is how long the generator's event loop takes to run what another thread hands it, on average: any
    token's time may be late by as much. `lag_share` compares it with the mean time between two tokens.
    `send_late_ms` is the mean delay of an open loop's requests behind their moment.
    """

    cpu_share: float
    cpu_cores: float
    lag_ms: float
    lag_max_ms: float
    lag_share: float = 0.0
    send_late_ms: float = 0.0

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is to be doubted because of it."""
        found: list[str] = []
        if self.cpu_share > WARN_SHARE:
            found.append(
                f"the load generator took {100 * self.cpu_share:.1f} % of this machine's CPU time: "
                "run it elsewhere, or on more cores"
            )
        if self.lag_share > WARN_SHARE:
            found.append(
                f"the load generator's event loop was {self.lag_ms:.2f} ms late on average, "
                f"{100 * self.lag_share:.1f} % of the mean time between two tokens: "
                "latencies hold as much of it"
            )
        return tuple(found)


class CostMeter:
    """Measures this process between entering and leaving, from inside its event loop.

    A thread knocks at the loop: event loops' own timers have a resolution of a millisecond, and show that.
    """

    def __init__(self) -> None:
        self._lags_s: list[float] = []
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._begun_s = self._begun_cpu_s = self._wall_s = self._cpu_s = 0.0

    async def __aenter__(self) -> Self:
        self._begun_s, self._begun_cpu_s = time.perf_counter(), time.process_time()
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._knock, args=(loop,), daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wall_s = time.perf_counter() - self._begun_s
        self._cpu_s = time.process_time() - self._begun_cpu_s
        self._is_over.set()
        assert self._thread is not None
        self._thread.join()

    def cost(self, inter_token_ms: float, send_late_ms: float) -> GeneratorCost:
        """The figures, once left."""
        lag_s = sum(self._lags_s) / len(self._lags_s) if self._lags_s else 0.0
        cores = self._cpu_s / self._wall_s if self._wall_s else 0.0
        return GeneratorCost(
            cpu_share=cores / len(os.sched_getaffinity(0)),
            cpu_cores=cores,
            lag_ms=1e3 * lag_s,
            lag_max_ms=1e3 * max(self._lags_s, default=0.0),
            lag_share=1e3 * lag_s / inter_token_ms if inter_token_ms else 0.0,
            send_late_ms=send_late_ms,
        )

    def _knock(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._is_over.wait(_KNOCK_S):
            loop.call_soon_threadsafe(self._came, time.perf_counter())

    def _came(self, knocked_s: float) -> None:
        self._lags_s.append(time.perf_counter() - knocked_s)
