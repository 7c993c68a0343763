"""The way up from store or disk to host memory: blocking work on worker threads, room made on this one."""

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import structlog

from inference_service.domain.adapter import AdapterDemand
from inference_service.domain.engine_report import LoadStage
from inference_service.domain.errors import (
    AdapterTooLargeError,
    CapacityError,
    PayloadError,
    PayloadMissingError,
)
from inference_service.ports import HostPool, PayloadSource
from inference_service.residency.config import ResidencyConfig
from inference_service.residency.entry import AdapterEntry
from inference_service.residency.eviction import host_victims
from inference_service.residency.table import AdapterTable
from lorikeet_contract.manifest import Manifest
from lorikeet_contract.status import ServiceError

# How often the manager is reminded that requests wait for a payload only it can stream.
_DEMAND_REPEAT_S = 5.0
# After the pool refused a read that by our count fits (its pieces may not), before asking again.
_CAPACITY_RETRY_S = 0.1

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Fetched:
    manifest: Manifest
    path: str
    num_bytes: int
    took_s: float


@dataclass(frozen=True, slots=True)
class _Read:
    num_bytes: int
    took_s: float


@dataclass(frozen=True, slots=True)
class _Discarded:
    """What was in the disk cache is gone, if it was there; `error` is what was wrong with it."""

    error: ServiceError
    stage: LoadStage
    was_cached: bool


_Job = Future[_Fetched] | Future[_Read] | Future[_Discarded] | Future[bool]


class HostLoads:
    """Runs at most `max_loads_in_flight` reads at a time, the most urgent first."""

    def __init__(
        self,
        table: AdapterTable,
        pool: HostPool,
        source: PayloadSource,
        executor: Executor,
        wake: Callable[[], None],
        config: ResidencyConfig,
        arena_bytes: int,
    ) -> None:
        self.num_loads = 0
        self.num_evictions = 0
        self._table = table
        self._pool = pool
        self._source = source
        self._executor = executor
        self._wake = wake
        self._config = config
        self._arena_bytes = arena_bytes
        self._in_flight: list[tuple[AdapterEntry, _Job]] = []
        self._errands: list[tuple[Future[bool], Callable[[bool], None]]] = []

    @property
    def is_busy(self) -> bool:
        """Whether a worker thread is at something."""
        return bool(self._in_flight)

    def collect(self, now_s: float) -> None:
        """Take in what the worker threads finished."""
        # Each is asked once: one that ends between two questions would be in neither answer, and its revision
        # would be loading for ever.
        jobs, self._in_flight = self._in_flight, []
        errands, self._errands = self._errands, []
        for errand, on_done in errands:
            if errand.done():
                on_done(errand.exception() is None and errand.result())
            else:
                self._errands.append((errand, on_done))
        for entry, future in jobs:
            if not future.done():
                self._in_flight.append((entry, future))
                continue
            entry.is_loading = False
            self._table.is_dirty = True
            error = future.exception()
            if error is not None:
                self._take_error(entry, error, now_s)
                continue
            result = future.result()
            if isinstance(result, _Fetched):
                self._take_fetched(entry, result, now_s)
            elif isinstance(result, _Read):
                self._take_read(entry, result)
            elif isinstance(result, _Discarded):
                self._take_discarded(entry, result, now_s)

    def start(self, now_s: float) -> None:
        """Begin loads, the most urgent first, as far as workers and room allow."""
        wanted = [
            entry
            for entry in self._table.entries.values()
            if entry.slot is None and not entry.has_host and entry.wanted_tier() and entry.may_load(now_s)
        ]
        for entry in sorted(wanted, key=AdapterEntry.urgency):
            if len(self._in_flight) >= self._config.max_loads_in_flight:
                return
            if entry.fetched is None:
                self._submit_fetch(entry)
            elif self._make_room(entry, now_s):
                self._submit_read(entry, *entry.fetched)

    def drop(self, entry: AdapterEntry) -> None:
        """Take a revision out of host memory."""
        if entry.has_host:
            self._pool.drop(entry.digest)
            entry.has_host = False
            self._table.changed(entry)

    def remove_from_disk(self, digest: str) -> None:
        """Delete a revision from the disk cache, on a worker thread; until that ended it is not loaded."""
        future = self._executor.submit(self._source.remove, digest)
        if entry := self._table.entries.get(digest):
            entry.on_disk = False
            self._watch(entry, future)

    def make_disk_room(self, num_bytes: int, on_done: Callable[[bool], None]) -> None:
        """Free this much of the disk cache, on a worker thread; tells whether there was as much."""
        future = self._executor.submit(self._source.make_room, num_bytes)
        self._errands.append((future, on_done))
        future.add_done_callback(lambda _: self._wake())

    def tell_demands(self, now_s: float) -> None:
        """Ask the manager for payloads that requests wait for and only it can bring; again now and then."""
        for entry in self._table.entries.values():
            if entry.awaits_stream and entry.waiters and now_s - entry.demand_told_s >= _DEMAND_REPEAT_S:
                entry.demand_told_s = now_s
                self._table.demands.append(AdapterDemand(entry.digest, len(entry.waiters)))

    def _submit_fetch(self, entry: AdapterEntry) -> None:
        digest, store_path = entry.digest, entry.source.store_path

        def fetch() -> _Fetched:
            begun_s = time.perf_counter()
            manifest, path = self._source.fetch(digest, store_path)
            num_bytes = self._pool.bytes_needed(manifest)
            return _Fetched(manifest, path, num_bytes, time.perf_counter() - begun_s)

        self._watch(entry, self._executor.submit(fetch))

    def _submit_read(self, entry: AdapterEntry, manifest: Manifest, path: str) -> None:
        def read() -> _Read:
            begun_s = time.perf_counter()
            num_bytes = self._pool.read(manifest, path)
            return _Read(num_bytes, time.perf_counter() - begun_s)

        self._watch(entry, self._executor.submit(read))

    def _watch(self, entry: AdapterEntry, future: _Job) -> None:
        entry.is_loading = True
        self._in_flight.append((entry, future))
        future.add_done_callback(lambda _: self._wake())

    def _take_fetched(self, entry: AdapterEntry, result: _Fetched, now_s: float) -> None:
        entry.num_bytes = result.num_bytes
        entry.on_disk = True
        self._table.load_stats.took(LoadStage.FETCH, result.took_s)
        most = min(self._pool.total_bytes, self._arena_bytes)
        if result.num_bytes > most:
            self._table.fail(entry, LoadStage.FETCH, _too_large(entry, most), now_s)
            return
        entry.fetched = (result.manifest, result.path)
        self._table.changed(entry)

    def _take_read(self, entry: AdapterEntry, result: _Read) -> None:
        entry.num_bytes = result.num_bytes
        self._table.load_stats.took(LoadStage.READ, result.took_s)
        entry.has_host = True
        entry.fetched = None
        entry.failure = None
        entry.num_failures = 0
        entry.retry_at_s = 0.0
        entry.damage = ""
        self.num_loads += 1
        self._table.changed(entry)
        log.info("residency.admitted", adapter=entry.digest, host_bytes=entry.num_bytes)

    def _take_error(self, entry: AdapterEntry, error: BaseException, now_s: float) -> None:
        if isinstance(error, CapacityError):
            self._take_no_room(entry, now_s)
            return
        stage = LoadStage.READ if entry.fetched else LoadStage.FETCH
        entry.fetched = None
        if isinstance(error, PayloadMissingError):
            # Not a failure yet: requests go on waiting, within their bound, for the manager to stream it.
            entry.awaits_stream = True
            if entry.damage:
                error = PayloadMissingError(f"{entry.damage}; thrown away, and {error.message}")
            self._table.end_calls(entry, error)
            return
        if not isinstance(error, ServiceError):
            log.error("residency.load_crashed", adapter=entry.digest, exc_info=error)
            # Its text may hold paths of the operator, and this one reaches the tenant.
            error = PayloadError(f"its files cannot be read here ({type(error).__name__})")
        log.warning("residency.load_failed", adapter=entry.digest, reason=error.message)
        if isinstance(error, PayloadError):
            self._discard(entry, stage, error)
        else:
            self._table.fail(entry, stage, error, now_s)

    def _discard(self, entry: AdapterEntry, stage: LoadStage, error: PayloadError) -> None:
        """What is in the disk cache may be what is damaged: no later try is to find it there."""
        digest = entry.digest
        entry.on_disk = False

        def discard() -> _Discarded:
            return _Discarded(error, stage, was_cached=self._source.remove(digest))

        self._watch(entry, self._executor.submit(discard))

    def _take_discarded(self, entry: AdapterEntry, result: _Discarded, now_s: float) -> None:
        if result.was_cached and not entry.damage:
            # The store's copy may be whole: fetched once more before anybody is told of a failure.
            entry.damage = result.error.message
            log.info("residency.refetched", adapter=entry.digest)
            return
        self._table.fail(entry, result.stage, result.error, now_s)

    def _take_no_room(self, entry: AdapterEntry, now_s: float) -> None:
        """The pool has less room than our count says; ask it again with one revision less."""
        victims = host_victims(self._table.entries.values(), entry, now_s)
        if victims:
            self._evict(victims[0])
        elif not any(other.has_host for other in self._table.entries.values()):
            error = _too_large(entry, self._pool.total_bytes)
            self._table.fail(entry, LoadStage.READ, error, now_s)
            return
        entry.retry_at_s = now_s + _CAPACITY_RETRY_S

    def _make_room(self, entry: AdapterEntry, now_s: float) -> bool:
        others = [other for other in self._table.entries.values() if other is not entry]
        # A read in progress holds its room, though nothing is there yet.
        held = sum(o.num_bytes for o in others if o.has_host or (o.is_loading and o.fetched))
        excess = held + entry.num_bytes - self._pool.total_bytes
        victims: list[AdapterEntry] = []
        for victim in host_victims(others, entry, now_s):
            if excess <= 0:
                break
            victims.append(victim)
            excess -= victim.num_bytes
        if excess > 0:
            return False
        for victim in victims:
            self._evict(victim)
        return True

    def _evict(self, victim: AdapterEntry) -> None:
        self.drop(victim)
        self.num_evictions += 1
        log.info("residency.evicted_from_host", adapter=victim.digest)


def _too_large(entry: AdapterEntry, most: int) -> AdapterTooLargeError:
    return AdapterTooLargeError(
        f"adapter {entry.digest} takes {entry.num_bytes} bytes here, at most {most} are possible; "
        "give the node a larger host pool and arena, or use a lower rank",
        metadata={"value": str(entry.num_bytes), "maximum": str(most)},
    )
