"""The adapter manager's error tree. Each class fixes one gRPC code and one reason.

ServiceError (lorikeet_contract)
├── InvalidRequestError         INVALID_ARGUMENT     INVALID_REQUEST          metadata: field
├── LimitExceededError          RESOURCE_EXHAUSTED   LIMIT_EXCEEDED           metadata: limit, value, maximum
├── UnauthenticatedError        UNAUTHENTICATED      UNAUTHENTICATED
├── PermissionDeniedError       PERMISSION_DENIED    PERMISSION_DENIED
├── TenantNotFoundError         NOT_FOUND            TENANT_NOT_FOUND
├── TenantExistsError           ALREADY_EXISTS       TENANT_EXISTS
├── TenantNotEmptyError         FAILED_PRECONDITION  TENANT_NOT_EMPTY         it still has adapters
├── TokenNotFoundError          NOT_FOUND            TOKEN_NOT_FOUND
├── RequestIdReusedError        ALREADY_EXISTS       REQUEST_ID_REUSED        the same id, another request
├── AdapterNotFoundError        NOT_FOUND            ADAPTER_NOT_FOUND
├── AdapterNotReadyError        FAILED_PRECONDITION  ADAPTER_NOT_READY        its upload failed or is not done
├── RevisionInUseError          FAILED_PRECONDITION  REVISION_IN_USE          an alias or a pin holds it
├── EtagMismatchError           ABORTED              ETAG_MISMATCH            read it again, then retry
├── UploadNotFoundError         NOT_FOUND            UPLOAD_NOT_FOUND
├── UploadConflictError         ABORTED              UPLOAD_CONFLICT          another stream or files, a gap
├── InvalidAdapterError         INVALID_ARGUMENT     INVALID_ADAPTER          metadata: problem, file, field
│   ├── UnsupportedAdapterError                      UNSUPPORTED_ADAPTER      valid, but not served exactly
│   └── AmbiguousAdapterError                        AMBIGUOUS_ADAPTER        needs an explicit option
├── BaseModelUnknownError       FAILED_PRECONDITION  BASE_MODEL_UNKNOWN       no node has told its schema yet
├── BaseMismatchError           FAILED_PRECONDITION  BASE_MISMATCH            metadata: base_digest, served
├── ArtifactStoreError          UNAVAILABLE          ARTIFACT_STORE           with retry_after_s
│   └── ArtifactMissingError    DATA_LOSS            ARTIFACT_MISSING         a revision is gone or cut short
├── RegistryUnavailableError    UNAVAILABLE          REGISTRY_UNAVAILABLE     with retry_after_s
│   ├── RegistryBehindError                                                   it lacks what was acknowledged
│   └── RegistryReplacedError                        REGISTRY_REPLACED        it is empty, or another's
├── RegistrySchemaError         FAILED_PRECONDITION  REGISTRY_SCHEMA          written by a newer version
├── ConcurrentChangeError       ABORTED              CONCURRENT_CHANGE        with retry_after_s
├── PurgeInProgressError        UNAVAILABLE          PURGE_IN_PROGRESS        with retry_after_s
├── NodeUnavailableError        UNAVAILABLE          NODE_UNAVAILABLE         with retry_after_s
├── NodeCallError               UNAVAILABLE          NODE_CALL                metadata: node, its code, reason
└── DrainingError               UNAVAILABLE          DRAINING                 with retry_after_s
"""

from collections.abc import Iterable

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
    """Another stream feeds the upload, it was begun with other files, or a chunk does not follow the last."""

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


class BaseMismatchError(ServiceError):
    """The adapter was made for one base model, and what is there serves others."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "BASE_MISMATCH"

    @staticmethod
    def of(base_digest: str, served: Iterable[str]) -> "BaseMismatchError":
        """With both digests."""
        others = ", ".join(sorted(served))
        return BaseMismatchError(
            f"the adapter is for base model {base_digest}, and the nodes serve {others or 'none'}: there its "
            "weights would mean something else; start a node with its base model, or push it for theirs",
            metadata={"base_digest": base_digest, "served": others},
        )


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


class TenantNotEmptyError(ServiceError):
    """A tenant that still has adapters cannot be deleted."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "TENANT_NOT_EMPTY"


class TokenNotFoundError(ServiceError):
    """The tenant has no such token."""

    code = StatusCode.NOT_FOUND
    reason = "TOKEN_NOT_FOUND"


class RequestIdReusedError(ServiceError):
    """The request id belongs to another request."""

    code = StatusCode.ALREADY_EXISTS
    reason = "REQUEST_ID_REUSED"


class RevisionInUseError(ServiceError):
    """An alias points at the revision, or a pin holds it."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "REVISION_IN_USE"


class RegistryBehindError(RegistryUnavailableError):
    """The registry's store came back with nothing in it, or with an older state than was acknowledged."""


class RegistryReplacedError(RegistryUnavailableError):
    """The store holds nothing or another registry than the one that this manager follows."""

    reason = "REGISTRY_REPLACED"


class RegistrySchemaError(ServiceError):
    """A record was written by a newer version of this program, or by nobody."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "REGISTRY_SCHEMA"


class PurgeInProgressError(ServiceError):
    """The same content is being removed from the artifact store right now."""

    code = StatusCode.UNAVAILABLE
    reason = "PURGE_IN_PROGRESS"


class NodeCallError(ServiceError):
    """A node refused a call or is away; says which node, and its own code, reason and words."""

    code = StatusCode.UNAVAILABLE
    reason = "NODE_CALL"

    def __init__(self, node: str, node_code: StatusCode, node_reason: str, message: str) -> None:
        super().__init__(
            f"node {node}: {message}",
            metadata={"node": node, "node_code": node_code.value, "node_reason": node_reason},
        )
        self.node_code = node_code
        self.node_reason = node_reason
        self.node_message = message
