"""What the engine says to a message that it cannot decode: whoever waits for an answer must get one."""

import msgspec

from inference_service.domain.request import FinishReason, RequestFinish, RequestOutput
from inference_service.engine.messages import CallFailure, FromEngine, Reply, StepOutputs
from lorikeet_contract.status import ServiceError

# Not what was wrong with it: no client can mend that, and the log says it.
_WORDS = "the engine could not read this request; its log says why"


class _Request(msgspec.Struct):
    request_id: str


class _Addressed(msgspec.Struct):
    """As much of any message as says who waits for its answer."""

    call_id: int | None = None
    request: _Request | None = None


_decoder = msgspec.msgpack.Decoder(_Addressed)


def refusal_of(frame: bytes) -> FromEngine | None:
    """The answer to an undecodable message; None where nobody can be told, or nobody waits."""
    try:
        addressed = _decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if addressed.request is not None:
        finish = RequestFinish(FinishReason.FAILED, error_reason=ServiceError.reason, error_message=_WORDS)
        return StepOutputs((RequestOutput(addressed.request.request_id, finish=finish),))
    if addressed.call_id is not None:
        return Reply(addressed.call_id, failure=CallFailure(ServiceError.reason, _WORDS))
    return None
