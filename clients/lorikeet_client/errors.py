"""Everything that this client raises, mapped once from the runtime's RpcFailure.

LorikeetError
├── InvalidValueError       a value that no request can carry, also a ValueError; nothing was sent
├── UploadRefusedError      the directory is no adapter that can be uploaded; nothing was sent
├── BrokenReplyError        a stream that lost a message or its finish; a reply of an incompatible release
└── CallError               the call ended with a status other than OK; code, reason, message, metadata
    ├── InvalidRequestError     INVALID_ARGUMENT, FAILED_PRECONDITION, OUT_OF_RANGE
    ├── AuthError               UNAUTHENTICATED, PERMISSION_DENIED
    ├── NotFoundError           NOT_FOUND
    ├── ConflictError           ALREADY_EXISTS, ABORTED
    ├── LimitError              RESOURCE_EXHAUSTED
    ├── UnavailableError        UNAVAILABLE
    ├── DeadlineError           DEADLINE_EXCEEDED
    ├── CallCancelledError      CANCELLED
    └── ServerError             anything else: a fault of the server
"""

from collections.abc import Generator
from contextlib import contextmanager

import grpc

from lorikeet_contract.status import StatusCode
from lorikeet_rpc.errors import RpcFailure, from_rpc_error


class LorikeetError(Exception):
    """The root of the tree."""


class InvalidValueError(LorikeetError, ValueError):
    """A value that no request can carry; the message names the field and the value. Nothing was sent."""


class UploadRefusedError(LorikeetError):
    """The directory cannot be uploaded; the message names the file and what to do."""


class BrokenReplyError(LorikeetError):
    """A reply that cannot be right. What a stream delivered before stays valid."""


class CallError(LorikeetError):
    """A status other than OK.

    `reason` is the stable UPPER_SNAKE word that programs may branch on, `metadata` its facts, and
    `retry_after_s` is set where the server says that trying again later helps.
    """

    def __init__(self, failure: RpcFailure) -> None:
        super().__init__(failure.message or failure.reason)
        self.code: StatusCode = failure.code
        self.reason: str = failure.reason
        self.message: str = failure.message or failure.reason
        self.metadata: dict[str, str] = failure.metadata
        self.retry_after_s: float | None = failure.retry_after_s


class InvalidRequestError(CallError):
    """An argument has a value that it may not have, now or ever."""


class AuthError(CallError):
    """The token is missing, unknown, or not allowed to do this."""


class NotFoundError(CallError):
    """No such adapter, revision, alias, tenant or upload."""


class ConflictError(CallError):
    """It exists already, or changed since it was read (etag)."""


class LimitError(CallError):
    """A quota, queue or size limit is reached; `metadata` names it."""


class UnavailableError(CallError):
    """The server is away, starting or draining."""


class DeadlineError(CallError):
    """The call's time was up."""


class CallCancelledError(CallError):
    """The call was cancelled, on this side or by the server."""


class ServerError(CallError):
    """The server failed; its log has the details."""


_BY_CODE: dict[StatusCode, type[CallError]] = {
    StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    StatusCode.FAILED_PRECONDITION: InvalidRequestError,
    StatusCode.OUT_OF_RANGE: InvalidRequestError,
    StatusCode.UNAUTHENTICATED: AuthError,
    StatusCode.PERMISSION_DENIED: AuthError,
    StatusCode.NOT_FOUND: NotFoundError,
    StatusCode.ALREADY_EXISTS: ConflictError,
    StatusCode.ABORTED: ConflictError,
    StatusCode.RESOURCE_EXHAUSTED: LimitError,
    StatusCode.UNAVAILABLE: UnavailableError,
    StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    StatusCode.CANCELLED: CallCancelledError,
}


def call_error(failure: RpcFailure) -> CallError:
    """The exception for a failed call."""
    return _BY_CODE.get(failure.code, ServerError)(failure)


@contextmanager
def mapped_errors() -> Generator[None]:
    """Turn a grpc.RpcError raised inside, blocking or asyncio, into a CallError."""
    try:
        yield
    except grpc.RpcError as error:
        raise call_error(from_rpc_error(error)) from error
