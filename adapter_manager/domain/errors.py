"""The adapter manager's error tree. Each class fixes one gRPC code and one reason.

ServiceError (lorikeet_contract)
├── InvalidRequestError       INVALID_ARGUMENT     INVALID_REQUEST        metadata: field
├── InvalidAdapterNameError   INVALID_ARGUMENT     INVALID_NAME           metadata: field
├── UnauthenticatedError      UNAUTHENTICATED      UNAUTHENTICATED
├── PermissionDeniedError     PERMISSION_DENIED    PERMISSION_DENIED
├── TenantNotFoundError       NOT_FOUND            TENANT_NOT_FOUND
├── TokenNotFoundError        NOT_FOUND            TOKEN_NOT_FOUND
├── AdapterNotFoundError      NOT_FOUND            ADAPTER_NOT_FOUND
├── RevisionNotFoundError     NOT_FOUND            REVISION_NOT_FOUND
├── TenantExistsError         ALREADY_EXISTS       TENANT_EXISTS
├── RequestIdReusedError      ALREADY_EXISTS       REQUEST_ID_REUSED
├── TenantNotEmptyError       FAILED_PRECONDITION  TENANT_NOT_EMPTY
├── RevisionInUseError        FAILED_PRECONDITION  REVISION_IN_USE        pinned, or an alias points at it
├── ModelUnknownError         FAILED_PRECONDITION  MODEL_UNKNOWN          no node was ever seen
├── RegistrySchemaError       FAILED_PRECONDITION  REGISTRY_SCHEMA        written by a newer version
├── QuotaExceededError        RESOURCE_EXHAUSTED   QUOTA_EXCEEDED         metadata: limit, value, maximum
├── EtagMismatchError         ABORTED              ETAG_MISMATCH
├── RegistryConflictError     ABORTED              REGISTRY_CONFLICT      with retry_after_s
├── PurgeInProgressError      UNAVAILABLE          PURGE_IN_PROGRESS      with retry_after_s
├── RegistryUnavailableError  UNAVAILABLE          REGISTRY_UNAVAILABLE   with retry_after_s
└── NodeError                 UNAVAILABLE          NODE_UNAVAILABLE       a node refused or is away
"""

from lorikeet_contract.status import ServiceError, StatusCode


class InvalidRequestError(ServiceError):
    """A field of the request has a value it may not have."""

    code = StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"


class InvalidAdapterNameError(ServiceError):
    """A name outside the grammar of names."""

    code = StatusCode.INVALID_ARGUMENT
    reason = "INVALID_NAME"


class UnauthenticatedError(ServiceError):
    """No bearer token, or one that nobody issued."""

    code = StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDeniedError(ServiceError):
    """A known caller asked for what only admins may do."""

    code = StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class TenantNotFoundError(ServiceError):
    """No such tenant, or not the caller's."""

    code = StatusCode.NOT_FOUND
    reason = "TENANT_NOT_FOUND"


class TokenNotFoundError(ServiceError):
    """The tenant has no such token."""

    code = StatusCode.NOT_FOUND
    reason = "TOKEN_NOT_FOUND"


class AdapterNotFoundError(ServiceError):
    """No such adapter, or not the caller's."""

    code = StatusCode.NOT_FOUND
    reason = "ADAPTER_NOT_FOUND"


class RevisionNotFoundError(ServiceError):
    """The adapter has no READY revision of that digest or alias."""

    code = StatusCode.NOT_FOUND
    reason = "REVISION_NOT_FOUND"


class TenantExistsError(ServiceError):
    """The tenant id is taken."""

    code = StatusCode.ALREADY_EXISTS
    reason = "TENANT_EXISTS"


class RequestIdReusedError(ServiceError):
    """The request id belongs to another request with other content."""

    code = StatusCode.ALREADY_EXISTS
    reason = "REQUEST_ID_REUSED"


class TenantNotEmptyError(ServiceError):
    """A tenant that still has adapters cannot be deleted."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "TENANT_NOT_EMPTY"


class RevisionInUseError(ServiceError):
    """An alias points at the revision, or a pin holds it."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "REVISION_IN_USE"


class ModelUnknownError(ServiceError):
    """No node was ever seen, so there is no schema to check an upload against."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "MODEL_UNKNOWN"


class RegistrySchemaError(ServiceError):
    """A record was written by a newer version of this program."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "REGISTRY_SCHEMA"


class QuotaExceededError(ServiceError):
    """The tenant has as much as it may have."""

    code = StatusCode.RESOURCE_EXHAUSTED
    reason = "QUOTA_EXCEEDED"


class EtagMismatchError(ServiceError):
    """The record changed since the caller read it."""

    code = StatusCode.ABORTED
    reason = "ETAG_MISMATCH"


class RegistryConflictError(ServiceError):
    """Others changed the same records all the time; nothing was changed."""

    code = StatusCode.ABORTED
    reason = "REGISTRY_CONFLICT"


class PurgeInProgressError(ServiceError):
    """The same content is being removed from the store right now."""

    code = StatusCode.UNAVAILABLE
    reason = "PURGE_IN_PROGRESS"


class RegistryUnavailableError(ServiceError):
    """The registry cannot be reached, or did not confirm that a write is durable."""

    code = StatusCode.UNAVAILABLE
    reason = "REGISTRY_UNAVAILABLE"


class NodeError(ServiceError):
    """A call to a node failed. `node_reason` is the node's own reason, such as ADAPTER_PAYLOAD."""

    code = StatusCode.UNAVAILABLE
    reason = "NODE_UNAVAILABLE"

    def __init__(self, message: str, *, node_code: StatusCode, node_reason: str) -> None:
        super().__init__(message, metadata={"node_code": node_code.value, "node_reason": node_reason})
        self.node_code = node_code
        self.node_reason = node_reason
