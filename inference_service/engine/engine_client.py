"""The engine as the front end's event loop uses it: implements `inference_service.ports.Engine`.

Every method runs on one event loop. Only this file knows that the engine is another process and may die.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Sequence

import structlog

from inference_service.domain.adapter import AdapterDemand, DesiredAdapter, ResidentAdapter
from inference_service.domain.engine import EngineInfo, EngineStatus
from inference_service.domain.engine_report import EngineReport
from inference_service.domain.errors import DrainingError, DuplicateRequestError, EngineDeadError
from inference_service.domain.request import EngineRequest, FinishReason, RequestOutput
from inference_service.domain.tenant import TenantShare
from inference_service.engine.config import EngineConfig
from inference_service.engine.failures import to_error
from inference_service.engine.messages import (
    AbortRequest,
    AddRequest,
    CallFailure,
    FromEngine,
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
    StepOutputs,
    ToEngine,
    UnloadAdapter,
)
from inference_service.engine.output_buffer import MAX_WAITING_PAIRS, OutputBuffer
from inference_service.engine.restart_pace import RestartPace
from inference_service.engine.supervisor import EngineProcess

_ABORT_GRACE_S = 5.0

log = structlog.get_logger()


@dataclasses.dataclass(slots=True, eq=False)
class _Stream:
    """One running request: the ids under which the engine runs its samples, by index, until each has ended.

    Wire ids are new for each request, so late news of an earlier one never reach it.
    """

    request_id: str
    wire_ids: dict[int, str]
    outputs: OutputBuffer


class EngineClient:
    """Starts the engine process, restarts it when it dies, and routes outputs to their requests."""

    def __init__(self, config: EngineConfig, process: EngineProcess) -> None:
        assert process.info is not None
        self.info: EngineInfo = process.info
        self.instance_id: str = process.instance_id
        self.num_restarts = 0
        self._config = config
        self._process: EngineProcess | None = process
        self._numbers = itertools.count(1)
        self._streams: dict[str, _Stream] = {}
        self._by_wire_id: dict[str, tuple[_Stream, int]] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._watchers: set[asyncio.Queue[ResidentAdapter | AdapterDemand | EngineDeadError]] = set()
        self._tenants: tuple[TenantShare, ...] = ()
        self._desired: tuple[tuple[DesiredAdapter, ...], str] | None = None
        self._pace = RestartPace()
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._supervision = asyncio.create_task(self._supervise(), name="engine-supervision")

    @classmethod
    async def start(cls, config: EngineConfig) -> "EngineClient":
        """Spawn the engine process; returns when its model is loaded.

        Raises:
            EngineDeadError: it could not start; the message says why.
        """
        return cls(config, await EngineProcess.start(config))

    @property
    def is_alive(self) -> bool:
        """Whether the engine process is up and ready now; False while it is being restarted."""
        return self._process is not None

    async def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        """Stream one request's outputs; see `ports.Engine`.

        Raises:
            DuplicateRequestError: a running request has the same id.
            DrainingError: `drain` was called.
            EngineDeadError: the engine process ended before the request did.
            ServiceError: the engine refused or failed the request; the class says why.
        """
        stream = self._open_stream(request)
        try:
            while stream.wire_ids:
                output = await stream.outputs.get()
                if (finish := output.finish) is not None:
                    del self._by_wire_id[stream.wire_ids.pop(output.index)]
                    if finish.reason is FinishReason.FAILED:
                        raise to_error(
                            CallFailure(finish.error_reason, finish.error_message, finish.error_metadata)
                        )
                yield dataclasses.replace(output, request_id=request.request_id)
        finally:
            self._close_stream(stream)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Stop a request, or one sample of it, within two steps; its last output says ABORTED.

        What has ended, or is unknown, is left as it is.
        """
        if stream := self._streams.get(request_id):
            for sample, wire_id in stream.wire_ids.items():
                if index in {None, sample}:
                    self._send(AbortRequest(wire_id))

    async def status(self) -> EngineStatus:
        """Counters as of the engine's last step; all zero while the engine is being restarted."""
        if self._process is None:
            return EngineStatus()
        return (await self._call(GetStatus)).status or EngineStatus()

    async def report(self) -> EngineReport:
        """What metrics show; see `ports.Engine`."""
        if self._process is None:
            return EngineReport()
        return (await self._call(GetReport)).report or EngineReport()

    async def set_desired(self, desired: Sequence[DesiredAdapter], store_url: str) -> None:
        """Replace the desired set; a restarted engine gets it again."""
        wanted = tuple(desired)
        self._desired = (wanted, store_url)
        if self._process is not None:
            await self._call(lambda call_id: SetDesired(call_id, wanted, store_url))

    async def set_tenants(self, tenants: Sequence[TenantShare]) -> None:
        """Replace the tenants' shares; a restarted engine gets them again."""
        shares = self._tenants = tuple(tenants)
        if self._process is not None:
            await self._call(lambda call_id: SetTenants(call_id, shares))

    async def load_adapter(self, wanted: DesiredAdapter) -> ResidentAdapter:
        """Bring a revision to a tier; returns when it is there."""
        reply = await self._call(lambda call_id: LoadAdapter(call_id, wanted))
        assert reply.adapter is not None
        return reply.adapter

    async def unload_adapter(self, digest: str, *, keep_on_disk: bool) -> bool:
        """Take a revision off device and host once no request holds it."""
        return (await self._call(lambda call_id: UnloadAdapter(call_id, digest, keep_on_disk))).done

    async def refuse_demand(self, digest: str, reason: str) -> bool:
        """End who waits for a revision that the manager cannot bring."""
        return (await self._call(lambda call_id: RefuseDemand(call_id, digest, reason))).done

    async def make_disk_room(self, num_bytes: int) -> bool:
        """Free this much of the disk cache."""
        return (await self._call(lambda call_id: MakeDiskRoom(call_id, num_bytes))).done

    async def resident(self) -> Sequence[ResidentAdapter]:
        """All revisions this node knows; none while the engine is being restarted."""
        if self._process is None:
            return ()
        return (await self._call(ListResident)).adapters

    def watch_residency(self) -> AsyncIterator[ResidentAdapter | AdapterDemand]:
        """Stream changes from this call on. Ends in EngineDeadError when the engine dies: start over then."""
        queue: asyncio.Queue[ResidentAdapter | AdapterDemand | EngineDeadError] = asyncio.Queue()
        self._watchers.add(queue)
        return self._watch(queue)

    async def drain(self, grace_s: float) -> int:
        """Refuse new requests, wait for running ones, abort the rest; returns how many were aborted."""
        self._is_draining = True
        if await self._wait_idle(grace_s):
            return 0
        left = tuple(self._streams)
        for request_id in left:
            self.abort(request_id)
        await self._wait_idle(_ABORT_GRACE_S)
        return len(left)

    async def close(self) -> None:
        """End the engine process and fail what still waits for it. Safe to call twice."""
        self._is_draining = True
        self._supervision.cancel()
        await asyncio.wait({self._supervision})
        process, self._process = self._process, None
        self._fail_all(EngineDeadError("the service is shutting down", retry_after_s=5.0))
        if process is not None:
            await process.end()

    def _open_stream(self, request: EngineRequest) -> _Stream:
        if self._is_draining:
            raise DrainingError("the service is shutting down and takes no new requests", retry_after_s=5.0)
        if self._process is None:
            raise _restarting()
        if request.request_id in self._streams:
            raise DuplicateRequestError(f"request id {request.request_id!r} is in use by a running request")
        sent = dataclasses.replace(request, request_id=f"{next(self._numbers)}:{request.request_id}")
        wire_ids = {index: sent.sample_id(index) for index in range(request.num_samples)}
        # A step brings all samples' at once: were that the bound, who keeps up would be too slow.
        pairs = request.num_samples * (1 + (request.sampling.logprobs or 0))
        stream = _Stream(request.request_id, wire_ids, OutputBuffer(max(MAX_WAITING_PAIRS, 2 * pairs)))
        # First, for what cannot be encoded raises here and must leave no stream behind; answers come later.
        self._send(AddRequest(sent))
        self._streams[request.request_id] = stream
        self._by_wire_id |= {wire_id: (stream, index) for index, wire_id in wire_ids.items()}
        self._idle.clear()
        return stream

    def _close_stream(self, stream: _Stream) -> None:
        del self._streams[stream.request_id]
        for wire_id in stream.wire_ids.values():
            del self._by_wire_id[wire_id]
            self._send(AbortRequest(wire_id))
        if not self._streams:
            self._idle.set()

    async def _watch(
        self, queue: "asyncio.Queue[ResidentAdapter | AdapterDemand | EngineDeadError]"
    ) -> AsyncIterator[ResidentAdapter | AdapterDemand]:
        try:
            while True:
                news = await queue.get()
                if isinstance(news, EngineDeadError):
                    raise news
                yield news
        finally:
            self._watchers.discard(queue)

    async def _wait_idle(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _send(self, message: ToEngine) -> None:
        if self._process is not None:
            self._process.send(message)

    async def _call(self, make: Callable[[int], ToEngine]) -> Reply:
        if self._process is None:
            raise _restarting()
        call_id = next(self._numbers)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._process.send(make(call_id))
            reply = await answer
        finally:
            self._calls.pop(call_id, None)
        if reply.failure is not None:
            raise to_error(reply.failure)
        return reply

    async def _supervise(self) -> None:
        """Route the engine's messages; when it dies fail what ran and start another, for ever."""
        while True:
            assert self._process is not None
            death = await self._route_until_death(self._process)
            log.error("engine.died", instance_id=self.instance_id, reason=death.message)
            process, self._process = self._process, None
            # What it died of is for the log: a traceback's words may hold another tenant's.
            self._fail_all(EngineDeadError("the engine process ended, another starts", retry_after_s=5.0))
            ending = asyncio.create_task(process.end(), name="engine-end")
            try:
                await asyncio.shield(ending)
            finally:
                # Also where `close` cancels this: nobody else knows the process any more.
                await ending
            while self._process is None:
                await asyncio.sleep(self._pace.next_pause_s())
                await self._restart()

    async def _route_until_death(self, process: EngineProcess) -> EngineDeadError:
        try:
            while True:
                self._route(await process.receive())
        except EngineDeadError as error:
            return error
        except Exception as error:
            # Without this task nobody would notice a death any more: an engine that says what we cannot take
            # is as good as dead.
            log.exception("engine.not_understood", instance_id=self.instance_id)
            return EngineDeadError(f"what it said could not be taken: {type(error).__name__}")

    async def _restart(self) -> None:
        try:
            process = await EngineProcess.start(self._config)
        except EngineDeadError as error:
            log.warning("engine.restart_failed", reason=error.message)
            return
        assert process.info is not None
        # First what the manager wants, then open for requests: the socket keeps the order.
        process.send(SetTenants(0, self._tenants))
        if self._desired is not None:
            process.send(SetDesired(0, *self._desired))
        self.info, self.instance_id, self._process = process.info, process.instance_id, process
        self.num_restarts += 1
        log.info("engine.restarted", instance_id=self.instance_id)

    def _route(self, message: FromEngine) -> None:
        match message:
            case StepOutputs(outputs=outputs):
                for output in outputs:
                    if output.token_ids:
                        self._pace.served()
                    stream, index = self._by_wire_id.get(output.request_id, (None, 0))
                    if stream is not None and not stream.outputs.put(
                        dataclasses.replace(output, index=index) if index else output
                    ):
                        self.abort(stream.request_id)
            case Reply():
                answer = self._calls.get(message.call_id)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case ResidencyNews(changed=changed, demands=demands):
                for queue in self._watchers:
                    for news in (*changed, *demands):
                        queue.put_nowait(news)
            case _:
                raise AssertionError(message)

    def _fail_all(self, error: EngineDeadError) -> None:
        for stream in self._streams.values():
            stream.outputs.fail(error)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)
        for queue in self._watchers:
            queue.put_nowait(error)


def _restarting() -> EngineDeadError:
    return EngineDeadError("the engine process is being restarted", retry_after_s=5.0)
