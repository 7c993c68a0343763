"""An engine without a model: answers by a script, one token a step, and counts what it is asked."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace

import msgspec

from inference_service.domain.adapter import (
    AdapterDemand,
    DesiredAdapter,
    ResidencyTier,
    ResidentAdapter,
)
from inference_service.domain.engine import EngineInfo, EngineLimits, EngineStatus
from inference_service.domain.engine_report import EngineReport
from inference_service.domain.errors import DrainingError, EngineDeadError
from inference_service.domain.request import (
    EngineRequest,
    FinishReason,
    RequestFinish,
    RequestOutput,
    RequestTimings,
    TokenLogprobs,
)
from inference_service.domain.tenant import TenantShare
from inference_service.engine.messages import AddRequest
from lorikeet_contract.schema import LoraSchema, LoraSite, SiteKind, SiteSlice

EOS = 256
_SITE = LoraSite("lm_head", None, SiteKind.LINEAR, 8, 300, (SiteSlice("", 300, ("lm_head",)),))


def make_limits(**changes: int) -> EngineLimits:
    """Limits with every field set."""
    values = {
        "max_context_tokens": 10_000,
        "max_running_requests": 8,
        "max_waiting_requests": 16,
        "max_step_tokens": 512,
        "max_top_logprobs": 20,
        "max_stop_strings": 4,
        "max_samples": 8,
        "max_rank": 64,
        "max_active_adapters": 4,
        "adapter_arena_bytes": 1 << 20,
        "host_pool_bytes": 1 << 21,
        "block_tokens": 16,
        "num_blocks": 100,
    }
    return EngineLimits(**{**values, **changes})


def make_info(vocab_size: int = 300, **limits: int) -> EngineInfo:
    """A model of bytes: token i is byte i, 256 ends, the rest is padding."""
    schema = LoraSchema(num_layers=0, sites=(_SITE,))
    return EngineInfo(
        model_name="fake",
        architecture="FakeForCausalLM",
        base_digest="b" * 64,
        dtype="float32",
        vocab_size=vocab_size,
        eos_token_ids=(EOS,),
        limits=make_limits(**limits),
        lora_schema=schema.to_json(),
    )


def _repeat_last(request: EngineRequest) -> Iterator[int]:
    while True:
        yield request.prompt_token_ids[-1]


class FakeEngine:
    """Implements `ports.Engine`. Set `script` and `step_s`; read the counters."""

    def __init__(self, info: EngineInfo | None = None) -> None:
        self.info = info or make_info()
        self.instance_id = "fake-1"
        self.num_restarts = 0
        self.report_held: asyncio.Event | None = None
        self.is_alive = True
        self.script: Callable[[EngineRequest], Iterator[int]] = _repeat_last
        self.step_s = 0.0
        self.requests: dict[str, EngineRequest] = {}
        self.emitted: dict[str, int] = {}
        self.running: set[str] = set()
        self.aborted: set[str] = set()
        self.held: asyncio.Event | None = None
        self.adapters: dict[str, ResidentAdapter] = {}
        self.desired: tuple[DesiredAdapter, ...] = ()
        self.tenants: tuple[TenantShare, ...] = ()
        self.store_url = ""
        self.loads: list[DesiredAdapter] = []
        self.load_error: Exception | None = None
        self.refused: dict[str, str] = {}
        self.freed: list[int] = []
        self.can_free = True
        self.num_closed = 0
        self._is_draining = False
        self._watchers: set[asyncio.Queue[ResidentAdapter | AdapterDemand | EngineDeadError]] = set()

    async def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        if self._is_draining:
            raise DrainingError("draining", retry_after_s=1)
        # As the real engine takes it: what it could not decode must fail here too.
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(AddRequest(request)), type=AddRequest)
        assert message.request == request
        self.requests[request.request_id] = request
        self.emitted[request.request_id] = 0
        self.running.add(request.request_id)
        try:
            if self.held is not None:
                await self.held.wait()
            # One sample after another: their order is nobody's promise.
            for index, sample in enumerate(request.samples()):
                async for output in self._steps(sample):
                    yield replace(output, request_id=request.request_id, index=index)
        finally:
            self.running.discard(request.request_id)

    async def _steps(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        sampling, script, count = request.sampling, self.script(request), 0
        prompt_logprobs = self._prompt_logprobs(request)
        while True:
            await asyncio.sleep(self.step_s)
            if not self.is_alive:
                raise EngineDeadError("the engine died", retry_after_s=5)
            if request.request_id in self.aborted:
                yield RequestOutput(
                    request.request_id, finish=self._finish(request, FinishReason.ABORTED, count)
                )
                return
            if request.deadline_s is not None and time.monotonic() >= request.deadline_s:
                yield RequestOutput(
                    request.request_id, finish=self._finish(request, FinishReason.DEADLINE, count)
                )
                return
            token = next(script)
            count += 1
            self.emitted[request.request_id] = count
            reason = None
            if token in sampling.stop_token_ids:
                reason = FinishReason.STOP_TOKEN
            elif count >= sampling.max_tokens:
                reason = FinishReason.LENGTH
            stop_token = token if reason is FinishReason.STOP_TOKEN else None
            yield RequestOutput(
                request.request_id,
                (token,),
                logprobs=() if sampling.logprobs is None else (self._logprobs(token, sampling.logprobs),),
                prompt_logprobs=prompt_logprobs if count == 1 else (),
                finish=self._finish(request, reason, count, stop_token) if reason else None,
            )
            if reason:
                return

    def _prompt_logprobs(self, request: EngineRequest) -> tuple[TokenLogprobs | None, ...]:
        if request.sampling.prompt_logprobs is None:
            return ()
        rest = (self._logprobs(t, request.sampling.prompt_logprobs) for t in request.prompt_token_ids[1:])
        return (None, *rest)

    def _logprobs(self, token: int, top: int) -> TokenLogprobs:
        value = -math.log(self.info.vocab_size)
        return TokenLogprobs.of(value, range(top), (value,) * top)

    @staticmethod
    def _finish(
        request: EngineRequest, reason: FinishReason, count: int, stop_token_id: int | None = None
    ) -> RequestFinish:
        return RequestFinish(
            reason,
            stop_token_id,
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=1,
            output_tokens=count,
            timings=RequestTimings(1, 2, 3, 4),
            tier_hit=ResidencyTier.HOST if request.digest else None,
        )

    def abort(self, request_id: str, index: int | None = None) -> None:
        request = self.requests.get(request_id)
        if index is not None:
            self.aborted.add(request.sample_id(index) if request else request_id)
        else:
            self.aborted |= {s.request_id for s in request.samples()} if request else {request_id}

    async def status(self) -> EngineStatus:
        return EngineStatus(running_requests=len(self.running), kv_blocks_total=100, arena_used_bytes=7)

    async def report(self) -> EngineReport:
        if self.report_held is not None:
            await self.report_held.wait()
        return EngineReport(status=await self.status())

    async def set_desired(self, desired: Sequence[DesiredAdapter], store_url: str) -> None:
        self.desired, self.store_url = tuple(desired), store_url

    async def set_tenants(self, tenants: Sequence[TenantShare]) -> None:
        self.tenants = tuple(tenants)

    async def load_adapter(self, wanted: DesiredAdapter) -> ResidentAdapter:
        self.loads.append(wanted)
        if self.load_error is not None:
            raise self.load_error
        adapter = ResidentAdapter(
            wanted.source.digest, wanted.tier, wanted.pinned, payload_bytes=wanted.source.payload_bytes
        )
        self.adapters[adapter.digest] = adapter
        self.tell(adapter)
        return adapter

    async def unload_adapter(self, digest: str, *, keep_on_disk: bool) -> bool:
        return self.adapters.pop(digest, None) is not None

    async def refuse_demand(self, digest: str, reason: str) -> bool:
        self.refused[digest] = reason
        return True

    async def make_disk_room(self, num_bytes: int) -> bool:
        self.freed.append(num_bytes)
        return self.can_free

    async def resident(self) -> Sequence[ResidentAdapter]:
        return tuple(self.adapters.values())

    def watch_residency(self) -> AsyncIterator[ResidentAdapter | AdapterDemand]:
        queue: asyncio.Queue[ResidentAdapter | AdapterDemand | EngineDeadError] = asyncio.Queue()
        self._watchers.add(queue)
        return self._watch(queue)

    async def _watch(
        self, queue: "asyncio.Queue[ResidentAdapter | AdapterDemand | EngineDeadError]"
    ) -> AsyncIterator[ResidentAdapter | AdapterDemand]:
        try:
            while True:
                event = await queue.get()
                if isinstance(event, EngineDeadError):
                    raise event
                yield event
        finally:
            self._watchers.discard(queue)

    def tell(self, event: ResidentAdapter | AdapterDemand | EngineDeadError) -> None:
        """Send an event to every watcher."""
        for queue in self._watchers:
            queue.put_nowait(event)

    def die(self) -> None:
        """End as a killed engine process does."""
        self.is_alive = False
        self.tell(EngineDeadError("the engine died", retry_after_s=5))

    def revive(self) -> None:
        """Come back as another instance."""
        self.is_alive, self.instance_id = True, "fake-2"
        self.num_restarts += 1

    async def drain(self, grace_s: float) -> int:
        self._is_draining = True
        end = time.monotonic() + grace_s
        while self.running and time.monotonic() < end:  # noqa: ASYNC110 (short and simple)
            await asyncio.sleep(0.01)
        left = set(self.running)
        self.aborted |= left
        return len(left)

    async def close(self) -> None:
        self.num_closed += 1
