"""What crosses the process boundary arrives as it was sent."""

import msgspec
import pytest

from inference_service.domain import errors
from inference_service.domain.adapter import AdapterDemand, ResidencyTier, ResidentAdapter
from inference_service.domain.durations import Durations
from inference_service.domain.engine import EngineStatus
from inference_service.domain.engine_report import (
    AdapterUse,
    EngineReport,
    LoadStage,
    ResidencyCounts,
    StageCounts,
)
from inference_service.domain.request import (
    FinishReason,
    RequestFinish,
    RequestOutput,
    RequestTimings,
    TokenLogprobs,
)
from inference_service.domain.tenant import TenantShare
from inference_service.engine.failures import to_error, to_failure
from inference_service.engine.messages import (
    AbortRequest,
    AddRequest,
    CallFailure,
    FromEngine,
    LoadAdapter,
    Reply,
    ResidencyNews,
    SetDesired,
    SetTenants,
    StepOutputs,
    ToEngine,
)
from lorikeet_contract.status import ServiceError
from tests.support.engine_builders import desire, make_request

DURATIONS = Durations()
DURATIONS.add(0.002)
REPORT = EngineReport(
    EngineStatus(steps=2),
    DURATIONS.counts(),
    AdapterUse(("a",), ("b", "c"), 2),
    ResidencyCounts(
        (("a", ResidencyTier.ACTIVE),),
        ((ResidencyTier.HOST, 3),),
        1,
        2,
        (StageCounts(LoadStage.READ, DURATIONS.counts(), (("ADAPTER_PAYLOAD", 1),)),),
    ),
    7,
)
FINISH = RequestFinish(
    FinishReason.STOP_TOKEN, 5, 3, 2, 4, RequestTimings(1.5, 2.5), ResidencyTier.HOST, "QUEUE_FULL", "full"
)
OUTPUT = RequestOutput(
    "a", (1, 2), (TokenLogprobs.of(-0.5, (1, 9), (-0.5, -2.0)),), (None, TokenLogprobs(float("-inf"))), FINISH
)


@pytest.mark.parametrize(
    "message",
    [
        AddRequest(make_request(digest="d", deadline_s=1.25, logprobs=3, seed=2**63, stop_strings=("x",))),
        AbortRequest("a"),
        SetDesired(1, (desire("d", ResidencyTier.ACTIVE, pinned=True),), "file:///x"),
        SetTenants(2, (TenantShare("t", 0.5, 1, 2),)),
        LoadAdapter(3, desire("d")),
    ],
    ids=lambda message: type(message).__name__,
)
def test_to_engine(message: ToEngine) -> None:
    """Encode, decode, compare."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToEngine) == message


@pytest.mark.parametrize(
    "message",
    [
        StepOutputs((OUTPUT, RequestOutput("b"))),
        Reply(1, status=EngineStatus(running_requests=3)),
        Reply(1, report=REPORT),
        Reply(2, CallFailure("INTERNAL", "x")),
        ResidencyNews((ResidentAdapter("d", ResidencyTier.COPYING),), (AdapterDemand("e", 2),)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_from_engine(message: FromEngine) -> None:
    """Encode, decode, compare; infinite log-probabilities included."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=FromEngine) == message


@pytest.mark.parametrize(
    "error",
    [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ServiceError)],
)
def test_errors_keep_their_class(error: type[ServiceError]) -> None:
    """By reason, every class of the tree."""
    back = to_error(to_failure(error("words")))
    assert (type(back), back.message) == (error, "words")


def test_unknown_reason_is_internal() -> None:
    """An engine newer than its front end cannot make it fail."""
    assert type(to_error(CallFailure("BRAND_NEW", "x"))) is ServiceError
