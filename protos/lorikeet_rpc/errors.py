"""Errors on the wire: ServiceError to google.rpc.Status on the server, back to RpcFailure on the client.

ServiceError (lorikeet_contract)   raised by services, sent as its own code with ErrorInfo and RetryInfo
anything else                      sent as INTERNAL with an opaque error id; its text never leaves the process
RpcFailure                         what a client sees, whoever made the status (us, gRPC, a proxy)
"""

import secrets
from urllib.parse import quote

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from lorikeet_contract.status import ServiceError, StatusCode

ERROR_DOMAIN = "lorikeet"
_DETAILS_KEY = "grpc-status-details-bin"

# A status travels in HTTP/2 trailers, twice (grpc-message and the details), and clients drop trailers beyond
# 8 KiB by default, turning a good error into a bare RESOURCE_EXHAUSTED. These bounds keep the sum below that.
_MAX_MESSAGE_WIRE_BYTES = 2048
_MAX_VALUE_BYTES = 256
_MAX_METADATA_ENTRIES = 12


class UnexpectedError(ServiceError):
    """Stands for any exception that is no ServiceError; carries only an id that the log also has."""

    code = StatusCode.INTERNAL
    reason = "INTERNAL"

    def __init__(self, error_id: str) -> None:
        super().__init__(
            f"internal error {error_id}; the server's log has the details under this id",
            metadata={"error_id": error_id},
        )
        self.error_id = error_id


class RpcFailure(Exception):  # noqa: N818 (the public name is part of the clients' API)
    """A call that ended with a status other than OK.

    `reason` is ErrorInfo's, or the code's own name where the status carries none (gRPC made it).
    """

    def __init__(
        self,
        code: StatusCode,
        reason: str,
        message: str,
        metadata: dict[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}" if message else str(code))
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata = metadata or {}
        self.retry_after_s = retry_after_s


def as_service_error(error: BaseException) -> ServiceError:
    """`error` itself if it is a ServiceError, else an UnexpectedError with a fresh id."""
    return error if isinstance(error, ServiceError) else UnexpectedError(secrets.token_hex(8))


def to_status(error: BaseException) -> grpc.Status:
    """The status to end an RPC with; fits default header limits whatever the error's text is."""
    known = as_service_error(error)
    code = grpc.StatusCode[known.code.name]
    status = status_pb2.Status(code=code.value[0], message=shorten(known.message))
    info = error_details_pb2.ErrorInfo(reason=known.reason, domain=ERROR_DOMAIN)
    for key in sorted(known.metadata)[:_MAX_METADATA_ENTRIES]:
        info.metadata[key] = _cut(known.metadata[key], _MAX_VALUE_BYTES)
    _pack(status, info)
    if known.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(max(0, round(known.retry_after_s * 1000)))
        _pack(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return rpc_status.to_status(status)


def from_rpc_error(error: grpc.RpcError) -> RpcFailure:
    """Read a failed call of either client API (grpc or grpc.aio) back, details and all."""
    # grpc.RpcError itself declares nothing; both APIs raise subclasses that have these (grpc.Call).
    code_of = getattr(error, "code", None)
    code = StatusCode(code_of().name) if code_of else StatusCode.UNKNOWN
    details_of = getattr(error, "details", None)
    message: str = (details_of() if details_of else None) or ""
    failure = RpcFailure(code, code.value, message)
    trailing_of = getattr(error, "trailing_metadata", None)
    for key, value in (trailing_of() if trailing_of else None) or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            _read_details(failure, value)
    return failure


def shorten(message: str) -> str:
    """`message`, cut so that its percent-encoded form fits a trailer, with a mark where it was cut."""
    # The length first: a template's words may quote megabytes, and `quote` is slow.
    if len(message) <= _MAX_MESSAGE_WIRE_BYTES and len(quote(message)) <= _MAX_MESSAGE_WIRE_BYTES:
        return message
    low, high = 0, min(len(message), _MAX_MESSAGE_WIRE_BYTES)
    while low < high:
        middle = (low + high + 1) // 2
        if len(quote(message[:middle])) <= _MAX_MESSAGE_WIRE_BYTES - 16:
            low = middle
        else:
            high = middle - 1
    return message[:low] + " [...]"


def _read_details(failure: RpcFailure, serialized: bytes) -> None:
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    try:
        for detail in status_pb2.Status.FromString(serialized).details:
            if detail.Unpack(info):
                failure.reason, failure.metadata = info.reason, dict(info.metadata)
            elif detail.Unpack(retry):
                failure.retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    except DecodeError:  # a proxy's own idea of this header: the code still holds
        return


def _pack(
    status: status_pb2.Status, detail: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo
) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _cut(value: str, max_bytes: int) -> str:
    encoded = value[: max_bytes + 1].encode("utf-8", "replace")
    return value if len(encoded) <= max_bytes else encoded[:max_bytes].decode("utf-8", "ignore")
