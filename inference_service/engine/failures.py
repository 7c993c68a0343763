"""How errors of the service's tree cross the process boundary: by their reason."""

from inference_service.domain import errors
from inference_service.engine.messages import CallFailure
from lorikeet_contract.status import ServiceError

# A guess at when a retry may succeed: a place in the queue frees up, or the engine is back.
_RETRY_AFTER_S = {"QUEUE_FULL": 1.0, "ENGINE_RESTARTING": 5.0, "DRAINING": 5.0}


def _leaves(root: type[ServiceError]) -> dict[str, type[ServiceError]]:
    found = {root.reason: root}
    for child in root.__subclasses__():
        if child.__module__ in {errors.__name__, ServiceError.__module__}:
            found |= _leaves(child)
    return found


_BY_REASON = _leaves(ServiceError)


def to_error(failure: CallFailure) -> ServiceError:
    """The exception for a failure; a reason that nobody declared becomes INTERNAL."""
    error = _BY_REASON.get(failure.error_reason, ServiceError)
    return error(
        failure.error_message,
        metadata=dict(failure.error_metadata),
        retry_after_s=_RETRY_AFTER_S.get(failure.error_reason),
    )


def to_failure(error: ServiceError) -> CallFailure:
    """What crosses the process boundary of an error."""
    return CallFailure(error.reason, error.message, tuple(error.metadata.items()))
