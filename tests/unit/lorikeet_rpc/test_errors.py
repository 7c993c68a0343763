"""Errors to statuses and back, without a network."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from lorikeet_contract.status import ServiceError, StatusCode
from lorikeet_rpc.errors import RpcFailure, from_rpc_error, shorten, to_status


class _QueueFullError(ServiceError):
    code = StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"


class _FailedCall(grpc.RpcError):
    def __init__(self, status: grpc.Status) -> None:
        self._status = status

    def code(self) -> grpc.StatusCode:
        return self._status.code

    def details(self) -> str:
        return self._status.details

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._status.trailing_metadata


def _over_the_wire(error: BaseException) -> RpcFailure:
    return from_rpc_error(_FailedCall(to_status(error)))


def test_service_error_round_trip() -> None:
    """Code, reason, message, metadata and retry delay all come back."""
    failure = _over_the_wire(_QueueFullError("too many", metadata={"limit": "7"}, retry_after_s=1.5))
    assert (failure.code, failure.reason, failure.message) == (
        StatusCode.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        "too many",
    )
    assert failure.metadata == {"limit": "7"}
    assert failure.retry_after_s == 1.5


def test_error_domain_is_ours() -> None:
    """ErrorInfo.domain tells our reasons from another service's."""
    (_, packed), *_ = to_status(_QueueFullError("x")).trailing_metadata
    info = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(packed).details[0].Unpack(info)
    assert info.domain == "lorikeet"


def test_unexpected_error_hides_its_text() -> None:
    """An unknown exception is INTERNAL with an id; its own text goes nowhere."""
    status = to_status(RuntimeError("the prompt was: secret"))
    assert status.code is grpc.StatusCode.INTERNAL
    assert "secret" not in status.details
    assert not any(b"secret" in value for _, value in status.trailing_metadata)
    failure = from_rpc_error(_FailedCall(status))
    assert failure.metadata["error_id"] in failure.message


def test_plain_grpc_error_keeps_its_code_as_reason() -> None:
    """A status that gRPC itself made has no details."""

    class Bare(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNIMPLEMENTED

        def details(self) -> None:
            return None

        def trailing_metadata(self) -> None:
            return None

    failure = from_rpc_error(Bare())
    assert (failure.code, failure.reason, failure.retry_after_s) == (
        StatusCode.UNIMPLEMENTED,
        "UNIMPLEMENTED",
        None,
    )


def test_broken_details_are_ignored() -> None:
    """A proxy's own header of that name does not hide the code."""

    class Odd(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

        def details(self) -> str:
            return "proxy"

        def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
            return (("grpc-status-details-bin", b"\xff\xff"),)

    assert from_rpc_error(Odd()).code is StatusCode.UNAVAILABLE


@given(
    st.text(alphabet=st.characters(codec="utf-8"), max_size=4000),
    st.dictionaries(st.text(max_size=20), st.text(max_size=900)),
)
def test_any_text_fits_the_trailers(message: str, metadata: dict[str, str]) -> None:
    """Trailers stay below the 8 KiB that clients accept by default, whatever is in the error."""
    status = to_status(_QueueFullError(message, metadata=metadata))
    details = sum(len(v) for _, v in status.trailing_metadata) * 4 / 3  # base64 on the wire
    assert details + len(status.details.encode()) < 8192


@pytest.mark.parametrize("message", ["", "short", "é" * 100])
def test_short_messages_are_untouched(message: str) -> None:
    """Only what does not fit is cut."""
    assert shorten(message) == message


def test_long_message_is_marked() -> None:
    """A cut message says that it was cut."""
    assert shorten("🚢" * 5000).endswith(" [...]")
