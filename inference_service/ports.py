"""The inference service's seams. Fakes for each stand in tests/support."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from inference_service.domain.adapter import AdapterDemand, AdapterStanding, DesiredAdapter, ResidentAdapter
from inference_service.domain.engine import EngineInfo, EngineStatus, ModelFacts
from inference_service.domain.engine_report import EngineReport
from inference_service.domain.request import EngineRequest, RequestOutput
from inference_service.domain.step import ModelRunnerOutput, SchedulerOutput
from inference_service.domain.tenant import TenantShare
from lorikeet_contract.manifest import Manifest


class ModelRunner(Protocol):
    """Owns the device's model, key-value cache and sampler. One caller: the engine loop.

    At most two steps are in flight, that is, launched and not collected. Both methods raise only where the
    process cannot go on.
    """

    @property
    def is_asynchronous(self) -> bool:
        """Whether a device of its own works between `launch` and `collect`."""
        ...

    def launch(self, step: SchedulerOutput) -> None:
        """Begin a step that schedules something; the device runs it after the one launched before.

        Tokens that the step before samples need not be known yet: a request's own last one stays on the
        device. Where the host has to know it (SamplingParams.waits_for_tokens) sampling alone is put off
        until the step before was collected.
        """
        ...

    def collect(self) -> ModelRunnerOutput:
        """Wait for the oldest step in flight and return what it brought."""
        ...


class HostPool(Protocol):
    """Adapter weights in host memory, in the compute dtype, scaling multiplied in; keyed by digest.

    Reads run on worker threads; every method is safe to call from any thread.
    """

    total_bytes: int
    used_bytes: int

    def read(self, manifest: Manifest, payload_path: str) -> int:
        """Read, verify every layer's sha256, convert and keep a revision. Blocking. Returns its bytes here.

        Raises:
            PayloadError: the file is missing, cut short or does not match the manifest.
            CapacityError: it does not fit; nothing was kept.
        """
        ...

    def bytes_needed(self, manifest: Manifest) -> int:
        """What `read` would take from the pool, and what the arena would take."""
        ...

    def drop(self, digest: str) -> None:
        """Forget a revision; unknown digests are fine."""
        ...


class DeviceArena(Protocol):
    """Adapter weights on the device and the tables by which kernels find them; for the engine loop alone."""

    num_slots: int
    total_bytes: int
    used_bytes: int

    def begin_copy(self, digest: str, slot: int) -> bool:
        """Start copying a revision from the host pool into `slot`, layer by layer. False: no room now."""
        ...

    def poll(self) -> Sequence[int]:
        """Slots whose copies ended since the last call; their tables are in place for the next step."""
        ...

    def release(self, slot: int) -> None:
        """Free a slot; the caller knows that no step uses it. Also cancels a running copy."""
        ...

    def compact(self) -> bool:
        """Move adapters together, leased ones too, so that free bytes lie side by side. False: none moved."""
        ...


class Backend(Protocol):
    """A loaded model with all its parts, as `EngineConfig.backend_factory` returns it."""

    @property
    def info(self) -> ModelFacts:
        """Fixed facts of the model."""
        ...

    @property
    def runner(self) -> ModelRunner:
        """Runs steps."""
        ...

    @property
    def host_pool(self) -> HostPool:
        """Adapters in host memory."""
        ...

    @property
    def arena(self) -> DeviceArena:
        """Adapters on the device."""
        ...

    def compilations(self) -> int:
        """Kernel compilations since the backend was ready; 0 where nothing is compiled."""
        ...


class PayloadSource(Protocol):
    """Brings a revision's manifest and payload into the node's disk cache. Blocking; any thread."""

    def fetch(self, digest: str, store_path: str) -> tuple[Manifest, str]:
        """Return the manifest and the payload's local path, fetching what is missing.

        Raises:
            PayloadMissingError: neither in the cache nor in a store that can be read.
            PayloadError: its manifest's sha256 is not the digest, or it is cut short.
            DiskCacheError: the disk cache cannot be written.
        """
        ...

    def cached(self) -> Sequence[str]:
        """Digests in the disk cache."""
        ...

    def remove(self, digest: str) -> bool:
        """Delete a revision from the disk cache. False: there was none, or it could not be deleted."""
        ...

    def make_room(self, num_bytes: int) -> bool:
        """Free this much of the disk cache, the least recently used first. False: there is not as much."""
        ...


class AdapterGate(Protocol):
    """Residency as the scheduler sees it. Same thread as the scheduler; nothing blocks."""

    def demand(self, digest: str, request_id: str, now_s: float) -> AdapterStanding:
        """Ask for an adapter on the device; asking again is cheap. Starts its load where need be."""
        ...

    def is_ready(self, digest: str) -> bool:
        """Whether a request could lease the adapter now; asks for nothing."""
        ...

    def withdraw(self, digest: str, request_id: str) -> None:
        """The request no longer waits for the adapter; unknown pairs are fine."""
        ...

    def acquire(self, digest: str, request_id: str, now_s: float) -> int:
        """Take the request's lease on an adapter that `demand` said can be leased; returns its slot."""
        ...

    def release(self, digest: str, request_id: str, now_s: float) -> None:
        """Give the request's lease back; exactly once for each `acquire`."""
        ...


class TokenObserver(Protocol):
    """Hears when requests' tokens come, for metrics. Never blocks, never raises."""

    def first_token(self, seconds: float) -> None:
        """A request's first token came this long after the request."""
        ...

    def next_tokens(self, gap_s: float, count: int) -> None:
        """More tokens came, each this long after the one before."""
        ...


class Engine(Protocol):
    """The engine as the front end sees it: an asyncio client of the engine process."""

    info: EngineInfo
    instance_id: str
    num_restarts: int

    @property
    def is_alive(self) -> bool:
        """Whether the engine process is up; False while it is being restarted."""
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        """Stream one request's outputs, the last of each sample with `finish`, until all samples have ended.

        Closing the iterator aborts what still runs. A sample that fails fails the request.

        Raises:
            EngineDeadError: the engine process ended before the request did.
        """
        ...

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Stop a request, or one sample of it, within two steps; unknown ones are fine. Never blocks."""
        ...

    async def status(self) -> EngineStatus:
        """Counters as of the engine's last step."""
        ...

    async def report(self) -> EngineReport:
        """What metrics show, as of the engine's last step; all zero while the engine is being restarted."""
        ...

    async def set_desired(self, desired: Sequence[DesiredAdapter], store_url: str) -> None:
        """Replace what the manager wants resident; revisions not named may be evicted when idle."""
        ...

    async def set_tenants(self, tenants: Sequence[TenantShare]) -> None:
        """Replace the tenants' weights and limits; others have weight 1 and no limit of their own."""
        ...

    async def load_adapter(self, wanted: DesiredAdapter) -> ResidentAdapter:
        """Bring a revision to a tier; returns when it is there.

        Raises:
            AdapterUnavailableError: its load failed for good.
            AdapterTooLargeError: it can never fit.
        """
        ...

    async def unload_adapter(self, digest: str, *, keep_on_disk: bool) -> bool:
        """Take a revision off device and host once no request holds it. False: it was not there."""
        ...

    async def refuse_demand(self, digest: str, reason: str) -> bool:
        """The manager cannot bring a demanded revision: who waits for it ends. False: nobody did."""
        ...

    async def make_disk_room(self, num_bytes: int) -> bool:
        """Free this much of the disk cache. False: it does not hold as much."""
        ...

    async def resident(self) -> Sequence[ResidentAdapter]:
        """All revisions this node knows."""
        ...

    def watch_residency(self) -> AsyncIterator[ResidentAdapter | AdapterDemand]:
        """Stream changes of residency, and demand that this node cannot meet by itself.

        Changes from the call on are kept until read; take the snapshot with `resident` after the call.
        """
        ...

    async def drain(self, grace_s: float) -> int:
        """Wait for running requests, abort the rest; returns how many were aborted."""
        ...

    async def close(self) -> None:
        """End the engine process."""
        ...
