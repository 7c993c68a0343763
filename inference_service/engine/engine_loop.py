"""The step loop: one thread that owns requests, blocks, slots and the device."""

import logging
import math
import time
from collections.abc import Callable

import structlog

from inference_service.domain.adapter import ResidentAdapter
from inference_service.domain.engine import EngineStatus
from inference_service.domain.engine_report import EngineReport
from inference_service.domain.errors import GrammarFailedError
from inference_service.domain.step import SchedulerOutput
from inference_service.engine.channel import EngineSide
from inference_service.engine.failures import to_failure
from inference_service.engine.garbage import StepCollector
from inference_service.engine.grammar_gate import GrammarGate
from inference_service.engine.messages import (
    AbortRequest,
    AddRequest,
    GetReport,
    GetStatus,
    ListResident,
    LoadAdapter,
    MakeDiskRoom,
    RefuseDemand,
    Reply,
    ResidencyNews,
    SetDesired,
    SetTenants,
    Shutdown,
    StepOutputs,
    ToEngine,
    UnloadAdapter,
)
from inference_service.engine.payload_source import CachedPayloadSource
from inference_service.engine.step_pipeline import StepPipeline
from inference_service.engine.waker import Waker
from inference_service.ports import Backend
from inference_service.residency.residency import Residency
from inference_service.scheduler.scheduler import Scheduler
from lorikeet_contract.status import ServiceError

# Nothing needs the loop this often; it only bounds what a missed wake-up could cost.
_LONGEST_SLEEP_S = 1.0

log = structlog.get_logger()


class EngineLoop:
    """Turns of: read messages, move adapters, run a step, send what it brought.

    Ends at `Shutdown`, or when the lifeline says that the parent is gone.
    """

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        residency: Residency,
        source: CachedPayloadSource,
        side: EngineSide,
        waker: Waker,
        lifeline_fd: int,
        *,
        overlaps: bool,
        collector: StepCollector,
        grammars: GrammarGate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._scheduler = scheduler
        self._residency = residency
        self._source = source
        self._side = side
        self._waker = waker
        self._lifeline_fd = lifeline_fd
        self._clock = clock
        self._collector = collector
        self._grammars = grammars
        self._is_ending = False
        self._pipeline = StepPipeline(
            scheduler, backend.runner, overlaps=overlaps, on_step=self._log_step, clock=clock
        )

    def run(self) -> None:
        """Turn until told to end."""
        while not self._is_ending:
            self._turn()
        self._grammars.close()

    def _turn(self) -> None:
        for message in self._side.receive():
            self._handle(message)
        self._take_compiled()
        self._residency.poll(self._clock())
        has_moved = self._pipeline.turn()
        self._send_news()
        if has_moved:
            self._collector.between_steps()
        elif not self._is_ending:
            self._collector.while_idle()
            self._sleep()

    def _take_compiled(self) -> None:
        for request, refusal in self._grammars.take_ready(self._clock()):
            if refusal:
                error = GrammarFailedError(refusal, metadata={"field": GrammarFailedError.field})
                self._scheduler.refuse(request, error)
            else:
                self._scheduler.add(request, self._clock())

    def _log_step(self, step: SchedulerOutput) -> None:
        if log.is_enabled_for(logging.DEBUG):  # what it takes to say it is done for nobody else
            log.debug(
                "engine.step_scheduled",
                step=step.step,
                requests=len(step.scheduled),
                tokens=step.num_tokens,
                adapters=sorted(self._scheduler.adapters_of(step)),
            )

    def _sleep(self) -> None:
        timeout_s = _LONGEST_SLEEP_S
        if (poll_in_s := self._residency.next_poll_in_s()) is not None:
            timeout_s = min(timeout_s, poll_in_s)
        if (deadline_s := self._scheduler.next_deadline_s()) is not None:
            timeout_s = min(timeout_s, deadline_s - self._clock())
        # Up to a whole millisecond: rounded down, the last fraction before a deadline would be spun away.
        ready = self._side.wait(math.ceil(max(0.0, timeout_s) * 1e3) / 1e3)
        if self._waker.fd in ready:
            self._waker.clear()
        if self._lifeline_fd in ready:
            # Nobody ever writes there: readable means that the parent is gone.
            self._is_ending = True

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest(request):
                if request.sampling.structured_output is None:
                    self._scheduler.add(request, self._clock())
                else:
                    self._grammars.add(request)
            case AbortRequest(request_id):
                self._abort(request_id)
            case SetDesired(call_id, desired, store_url):
                self._source.set_store_url(store_url)
                self._residency.set_desired(desired)
                self._side.send(Reply(call_id, done=True))
            case SetTenants(call_id, tenants):
                self._scheduler.set_tenants(tenants)
                self._side.send(Reply(call_id, done=True))
            case LoadAdapter(call_id, wanted):
                self._residency.load(wanted, self._clock(), lambda end: self._reply_load(call_id, end))
            case UnloadAdapter(call_id, digest, keep_on_disk):
                self._residency.unload(
                    digest,
                    keep_on_disk=keep_on_disk,
                    on_done=lambda was_there: self._side.send(Reply(call_id, done=was_there)),
                )
            case RefuseDemand(call_id, digest, reason):
                was_awaited = self._residency.refuse_demand(digest, reason, self._clock())
                self._side.send(Reply(call_id, done=was_awaited))
            case MakeDiskRoom(call_id, num_bytes):
                self._residency.make_disk_room(
                    num_bytes, lambda is_freed: self._side.send(Reply(call_id, done=is_freed))
                )
            case GetStatus(call_id):
                self._side.send(Reply(call_id, status=self._status()))
            case GetReport(call_id):
                self._side.send(Reply(call_id, report=self._report()))
            case ListResident(call_id):
                self._side.send(Reply(call_id, adapters=tuple(self._residency.resident())))
            case Shutdown():
                self._is_ending = True

    def _abort(self, request_id: str) -> None:
        request = self._grammars.withdraw(request_id)
        if request is None:
            self._scheduler.abort(request_id, self._clock())
            return
        # Let in only for the output that says how it ended. All samples at once, though each has an abort of
        # its own on the way: none of them has a matcher, so none may see a step.
        self._scheduler.add(request, self._clock())
        for sample in request.samples():
            self._scheduler.abort(sample.request_id, self._clock())

    def _reply_load(self, call_id: int, end: ResidentAdapter | ServiceError) -> None:
        if isinstance(end, ServiceError):
            self._side.send(Reply(call_id, failure=to_failure(end)))
        else:
            self._side.send(Reply(call_id, adapter=end))

    def _send_news(self) -> None:
        if outputs := self._scheduler.take_outputs():
            self._side.send(StepOutputs(tuple(outputs)))
        changed, demands = self._residency.take_changed(), self._residency.take_demands()
        if changed or demands:
            self._side.send(ResidencyNews(tuple(changed), tuple(demands)))

    def _report(self) -> EngineReport:
        return EngineReport(
            status=self._status(),
            step_durations=self._pipeline.durations.counts(),
            use=self._scheduler.adapter_use(),
            residency=self._residency.counts(),
            prefix_query_tokens=self._scheduler.stats().prefix_query_tokens,
        )

    def _status(self) -> EngineStatus:
        scheduler, residency = self._scheduler.stats(), self._residency.stats()
        return EngineStatus(
            running_requests=scheduler.running_requests,
            waiting_requests=scheduler.waiting_requests,
            kv_blocks_total=self._backend.info.num_blocks,
            kv_blocks_available=scheduler.blocks_available,
            adapter_leases=residency.leases,
            active_adapters=residency.active_adapters,
            host_adapters=residency.host_adapters,
            arena_used_bytes=residency.arena_used_bytes,
            host_used_bytes=residency.host_used_bytes,
            steps=scheduler.steps,
            preemptions=scheduler.preemptions,
            adapter_loads=residency.loads,
            adapter_evictions=residency.evictions,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            compilations=self._backend.compilations(),
        )
