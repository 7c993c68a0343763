"""The adapter manager's error tree. Each class fixes one gRPC code and one reason.

ServiceError (lorikeet_contract)
├── InvalidRequestError         INVALID_ARGUMENT     INVALID_REQUEST          metadata: field
├── LimitExceededError          RESOURCE_EXHAUSTED   LIMIT_EXCEEDED           metadata: limit, value, maximum
├── UnauthenticatedError        UNAUTHENTICATED      UNAUTHENTICATED
├── PermissionDeniedError       PERMISSION_DENIED    PERMISSION_DENIED
├── TenantNotFoundError         NOT_FOUND            TENANT_NOT_FOUND
├── TenantExistsError           ALREADY_EXISTS       TENANT_EXISTS
├── AdapterNotFoundError        NOT_FOUND            ADAPTER_NOT_FOUND
├── AdapterNotReadyError        FAILED_PRECONDITION  ADAPTER_NOT_READY        its upload failed or is not done
├── EtagMismatchError           ABORTED              ETAG_MISMATCH            read it again, then retry
├── UploadNotFoundError         NOT_FOUND            UPLOAD_NOT_FOUND
├── UploadConflictError         ABORTED              UPLOAD_CONFLICT          another stream, other files, a gap
├── InvalidAdapterError         INVALID_ARGUMENT     INVALID_ADAPTER          metadata: problem, file, field, ...
│   ├── UnsupportedAdapterError                      UNSUPPORTED_ADAPTER      valid, but not served exactly
│   └── AmbiguousAdapterError                        AMBIGUOUS_ADAPTER        needs an explicit option
├── BaseModelUnknownError       FAILED_PRECONDITION  BASE_MODEL_UNKNOWN       no node has told its schema yet
├── ArtifactStoreError          UNAVAILABLE          ARTIFACT_STORE           with retry_after_s
│   └── ArtifactMissingError    DATA_LOSS            ARTIFACT_MISSING         a stored revision is gone or cut short
├── RegistryUnavailableError    UNAVAILABLE          REGISTRY_UNAVAILABLE     with retry_after_s
├── ConcurrentChangeError       ABORTED              CONCURRENT_CHANGE        with retry_after_s
├── NodeUnavailableError        UNAVAILABLE          NODE_UNAVAILABLE         with retry_after_s
└── DrainingError               UNAVAILABLE          DRAINING                 with retry_after_s
"""

from lorikeet_contract.status import ServiceError, StatusCode


class InvalidRequestError(ServiceError):
    """A field of the request has a value it may not have."""

    code = StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"


class LimitExceededError(ServiceError):
    """A request asks for more than a limit allows; the limit is named."""

    code = StatusCode.RESOURCE_EXHAUSTED
    reason = "LIMIT_EXCEEDED"


class UnauthenticatedError(ServiceError):
    """No bearer token, or one that nobody issued."""

    code = StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDeniedError(ServiceError):
    """A known caller asked for what only others may do."""

    code = StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class TenantNotFoundError(ServiceError):
    """No tenant of that id."""

    code = StatusCode.NOT_FOUND
    reason = "TENANT_NOT_FOUND"


class TenantExistsError(ServiceError):
    """A tenant of that id is there already."""

    code = StatusCode.ALREADY_EXISTS
    reason = "TENANT_EXISTS"


class AdapterNotFoundError(ServiceError):
    """No adapter, revision or alias of that name."""

    code = StatusCode.NOT_FOUND
    reason = "ADAPTER_NOT_FOUND"


class AdapterNotReadyError(ServiceError):
    """The adapter has no READY revision to act on."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "ADAPTER_NOT_READY"


class EtagMismatchError(ServiceError):
    """The record changed since the caller read it."""

    code = StatusCode.ABORTED
    reason = "ETAG_MISMATCH"


class UploadNotFoundError(ServiceError):
    """No upload of that request id waits to be resumed."""

    code = StatusCode.NOT_FOUND
    reason = "UPLOAD_NOT_FOUND"


class UploadConflictError(ServiceError):
    """The upload is fed by another stream, was begun with other files, or a chunk does not follow the last."""

    code = StatusCode.ABORTED
    reason = "UPLOAD_CONFLICT"


class InvalidAdapterError(ServiceError):
    """The uploaded files are no valid adapter for the base model."""

    code = StatusCode.INVALID_ARGUMENT
    reason = "INVALID_ADAPTER"


class UnsupportedAdapterError(InvalidAdapterError):
    """The adapter uses a feature that this server would not compute exactly."""

    reason = "UNSUPPORTED_ADAPTER"


class AmbiguousAdapterError(InvalidAdapterError):
    """The files alone do not say what they mean; an option of the upload must."""

    reason = "AMBIGUOUS_ADAPTER"


class BaseModelUnknownError(ServiceError):
    """No node has told its model yet, so there is nothing to check an upload against."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "BASE_MODEL_UNKNOWN"


class ArtifactStoreError(ServiceError):
    """The artifact store did not do what was asked."""

    code = StatusCode.UNAVAILABLE
    reason = "ARTIFACT_STORE"


class ArtifactMissingError(ArtifactStoreError):
    """A registered revision's files are not in the store, or not whole."""

    code = StatusCode.DATA_LOSS
    reason = "ARTIFACT_MISSING"


class RegistryUnavailableError(ServiceError):
    """The registry cannot be reached or does not acknowledge writes."""

    code = StatusCode.UNAVAILABLE
    reason = "REGISTRY_UNAVAILABLE"


class ConcurrentChangeError(ServiceError):
    """Others changed the same record too often while this change was tried."""

    code = StatusCode.ABORTED
    reason = "CONCURRENT_CHANGE"


class NodeUnavailableError(ServiceError):
    """No node can do this now."""

    code = StatusCode.UNAVAILABLE
    reason = "NODE_UNAVAILABLE"


class DrainingError(ServiceError):
    """The service is shutting down and takes no new requests."""

    code = StatusCode.UNAVAILABLE
    reason = "DRAINING"
