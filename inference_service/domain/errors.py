"""The inference service's error tree. Each class fixes one gRPC code and one reason.

ServiceError (lorikeet_contract)
├── InvalidRequestError      INVALID_ARGUMENT     INVALID_REQUEST
├── LimitExceededError       INVALID_ARGUMENT     LIMIT_EXCEEDED         metadata: limit, value, maximum
├── UnauthenticatedError     UNAUTHENTICATED      UNAUTHENTICATED
├── PermissionDeniedError    PERMISSION_DENIED    PERMISSION_DENIED
├── AdapterNotFoundError     NOT_FOUND            ADAPTER_NOT_FOUND
├── AdapterUnavailableError  FAILED_PRECONDITION  ADAPTER_UNAVAILABLE    its load failed for good; says why
├── AdapterTooLargeError     FAILED_PRECONDITION  ADAPTER_TOO_LARGE      can never fit this node
├── QueueFullError           RESOURCE_EXHAUSTED   QUEUE_FULL             with retry_after_s
├── SlowClientError          RESOURCE_EXHAUSTED   SLOW_CLIENT
├── DuplicateRequestError    ALREADY_EXISTS       DUPLICATE_REQUEST
├── NotFiniteError           FAILED_PRECONDITION  LOGITS_NOT_FINITE      weights overflow the compute dtype
├── GrammarFailedError       FAILED_PRECONDITION  GRAMMAR_FAILED         structured output cannot go on
├── GrammarsMissingError     FAILED_PRECONDITION  GRAMMARS_UNAVAILABLE   no structured output on this node
├── DeadlineError            DEADLINE_EXCEEDED    DEADLINE_EXCEEDED
├── NotReadyError            UNAVAILABLE          NOT_READY              with retry_after_s
├── DrainingError            UNAVAILABLE          DRAINING               with retry_after_s
├── EngineDeadError          UNAVAILABLE          ENGINE_RESTARTING      with retry_after_s
├── StaleGenerationError     FAILED_PRECONDITION  STALE_GENERATION
├── PayloadError             FAILED_PRECONDITION  ADAPTER_PAYLOAD        cut short or not what its digest says
│   └── PayloadMissingError                       ADAPTER_PAYLOAD_MISSING  not here, and no store has it
├── DiskCacheError           RESOURCE_EXHAUSTED   DISK_CACHE             the node's disk takes no payload
└── CapacityError            RESOURCE_EXHAUSTED   NO_CAPACITY            no room now; for residency alone
"""

from lorikeet_contract.status import ServiceError, StatusCode


class InvalidRequestError(ServiceError):
    """A field of the request has a value it may not have."""

    code = StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"


class LimitExceededError(ServiceError):
    """A request asks for more than a limit allows; the limit is named."""

    code = StatusCode.INVALID_ARGUMENT
    reason = "LIMIT_EXCEEDED"


class UnauthenticatedError(ServiceError):
    """No bearer token, or one that nobody issued."""

    code = StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDeniedError(ServiceError):
    """A known caller asked for what only others may do."""

    code = StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class AdapterNotFoundError(ServiceError):
    """No adapter of that name is registered for the tenant."""

    code = StatusCode.NOT_FOUND
    reason = "ADAPTER_NOT_FOUND"


class AdapterUnavailableError(ServiceError):
    """The adapter is registered but its load failed."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "ADAPTER_UNAVAILABLE"


class AdapterTooLargeError(ServiceError):
    """The adapter can never fit this node: its bytes, or the rank that it has. Trying again is in vain."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "ADAPTER_TOO_LARGE"


class QueueFullError(ServiceError):
    """Too many requests wait already, of this tenant or in all."""

    code = StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"


class SlowClientError(ServiceError):
    """The client takes its outputs so slowly that they pile up here."""

    code = StatusCode.RESOURCE_EXHAUSTED
    reason = "SLOW_CLIENT"


class DuplicateRequestError(ServiceError):
    """The tenant has a running request of that id."""

    code = StatusCode.ALREADY_EXISTS
    reason = "DUPLICATE_REQUEST"


class NotFiniteError(ServiceError):
    """The model's output is not finite: its weights, or the adapter's, overflow the compute dtype."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "LOGITS_NOT_FINITE"


class GrammarFailedError(ServiceError):
    """Structured output came to where no token may come, or where following it takes too much work."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "GRAMMAR_FAILED"
    field = "sampling.structured_output"


class GrammarsMissingError(ServiceError):
    """The node lacks llguidance, or the model's tokenizer is one that it cannot serve."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "GRAMMARS_UNAVAILABLE"


class DeadlineError(ServiceError):
    """The request's deadline passed."""

    code = StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class NotReadyError(ServiceError):
    """The service still waits for what it needs from its manager."""

    code = StatusCode.UNAVAILABLE
    reason = "NOT_READY"


class DrainingError(ServiceError):
    """The service is shutting down and takes no new requests."""

    code = StatusCode.UNAVAILABLE
    reason = "DRAINING"


class EngineDeadError(ServiceError):
    """The engine process ended; it is being restarted."""

    code = StatusCode.UNAVAILABLE
    reason = "ENGINE_RESTARTING"


class StaleGenerationError(ServiceError):
    """A push carried a generation older than what this node has."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "STALE_GENERATION"


class PayloadError(ServiceError):
    """A revision's files are missing, cut short or not what the digest says."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "ADAPTER_PAYLOAD"


class PayloadMissingError(PayloadError):
    """A revision is neither in the disk cache nor in a store that this node can read."""

    reason = "ADAPTER_PAYLOAD_MISSING"


class DiskCacheError(ServiceError):
    """The disk cache could not be written: its disk is full, read-only or broken."""

    code = StatusCode.RESOURCE_EXHAUSTED
    reason = "DISK_CACHE"


class CapacityError(ServiceError):
    """No room in the host pool right now."""

    code = StatusCode.RESOURCE_EXHAUSTED
    reason = "NO_CAPACITY"
