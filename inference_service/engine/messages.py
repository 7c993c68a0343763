"""What the front end and the engine process say to each other: msgspec Structs around domain dataclasses.

`call_id` pairs a question with its `Reply`. All times are on the clock of `time.monotonic`.
"""

import msgspec

from inference_service.domain.adapter import AdapterDemand, DesiredAdapter, ResidentAdapter
from inference_service.domain.engine import EngineInfo, EngineStatus
from inference_service.domain.engine_report import EngineReport
from inference_service.domain.request import EngineRequest, RequestOutput
from inference_service.domain.tenant import TenantShare


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Take a request in; every one is answered by outputs, the last of them with `finish`."""

    request: EngineRequest


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """Stop a request; unknown ids are fine."""

    request_id: str


class SetDesired(msgspec.Struct, frozen=True, tag=True):
    """Replace the desired set. Reply: None."""

    call_id: int
    desired: tuple[DesiredAdapter, ...]
    store_url: str


class SetTenants(msgspec.Struct, frozen=True, tag=True):
    """Replace the tenants' shares. Reply: None."""

    call_id: int
    tenants: tuple[TenantShare, ...]


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Bring a revision to a tier. Reply, once it is there: ResidentAdapter."""

    call_id: int
    wanted: DesiredAdapter


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Take a revision off device and host. Reply, once it is gone: bool."""

    call_id: int
    digest: str
    keep_on_disk: bool


class RefuseDemand(msgspec.Struct, frozen=True, tag=True):
    """The manager cannot bring a demanded revision. Reply: bool, whether anybody waited for it."""

    call_id: int
    digest: str
    reason: str


class MakeDiskRoom(msgspec.Struct, frozen=True, tag=True):
    """Free this much of the disk cache. Reply: bool, whether there was as much."""

    call_id: int
    num_bytes: int


class GetStatus(msgspec.Struct, frozen=True, tag=True):
    """Reply: EngineStatus."""

    call_id: int


class GetReport(msgspec.Struct, frozen=True, tag=True):
    """Reply: EngineReport."""

    call_id: int


class ListResident(msgspec.Struct, frozen=True, tag=True):
    """Reply: tuple of ResidentAdapter."""

    call_id: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process; what still runs is dropped."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded. Sent once."""

    info: EngineInfo


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """All outputs of one turn of the loop."""

    outputs: tuple[RequestOutput, ...]


class ResidencyNews(msgspec.Struct, frozen=True, tag=True):
    """What changed in residency since the last one, in order."""

    changed: tuple[ResidentAdapter, ...] = ()
    demands: tuple[AdapterDemand, ...] = ()


class CallFailure(msgspec.Struct, frozen=True, tag=True):
    """An error of the service's tree, by its reason."""

    error_reason: str
    error_message: str
    error_metadata: tuple[tuple[str, str], ...] = ()


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The answer to one call; what the call's class promises is set."""

    call_id: int
    failure: CallFailure | None = None
    status: EngineStatus | None = None
    report: EngineReport | None = None
    adapter: ResidentAdapter | None = None
    adapters: tuple[ResidentAdapter, ...] = ()
    done: bool = False


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The loop's last words: the process ends now."""

    message: str


ToEngine = (
    AddRequest
    | AbortRequest
    | SetDesired
    | SetTenants
    | LoadAdapter
    | UnloadAdapter
    | RefuseDemand
    | MakeDiskRoom
    | GetStatus
    | GetReport
    | ListResident
    | Shutdown
)
FromEngine = Ready | StepOutputs | ResidencyNews | Reply | EngineFailed
