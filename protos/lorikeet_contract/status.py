"""The root of both services' error trees. The RPC runtime turns any ServiceError into a gRPC status."""

from enum import StrEnum
from typing import ClassVar


class StatusCode(StrEnum):
    """Names of the canonical gRPC codes, so that domains need not import grpc."""

    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"
    UNAVAILABLE = "UNAVAILABLE"
    DATA_LOSS = "DATA_LOSS"
    UNAUTHENTICATED = "UNAUTHENTICATED"


class ServiceError(Exception):
    """An error with a gRPC code and a stable reason; subclasses fix both.

    Args:
        message: what is wrong, with which value, and what to do.
        metadata: facts for `google.rpc.ErrorInfo.metadata` (field, value, limit, ...).
        retry_after_s: set where trying again later helps (`google.rpc.RetryInfo`).
    """

    code: ClassVar[StatusCode] = StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        metadata: dict[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = metadata or {}
        self.retry_after_s = retry_after_s
