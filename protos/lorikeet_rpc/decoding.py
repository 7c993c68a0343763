"""Request bytes to messages. What cannot be decoded, or would take too long to, becomes an error of ours.

gRPC decodes before any interceptor runs, on the event loop: an exception there is answered by gRPC itself, in
words that show our classes, and a message of millions of tiny parts holds every other call up for seconds.
So a decoder here never raises: it returns `Refusal`, which the interceptor raises once the caller is known.
"""

from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from lorikeet_contract.status import ServiceError, StatusCode
from lorikeet_rpc.wire_count import TooManyPartsError, WireBounds, check_parts

# A message below this cannot hold enough parts to matter.
_SMALL_BYTES = 32 << 10


class UndecodableRequestError(ServiceError):
    """The bytes are no message of the method's type."""

    code = StatusCode.INVALID_ARGUMENT
    reason = "UNDECODABLE_REQUEST"


class TooManyValuesError(ServiceError):
    """The message has more parts than any valid request."""

    code = StatusCode.INVALID_ARGUMENT
    reason = "LIMIT_EXCEEDED"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Stands where a message would."""

    error: ServiceError


def decoder(deserialize: Callable[[bytes], Any], bounds: WireBounds | None) -> Callable[[bytes], Any]:
    """`deserialize` (a message class's FromString) that returns a Refusal instead of raising.

    Args:
        deserialize: the generated handler's own.
        bounds: of messages larger than 32 KiB; None for methods whose callers are trusted.
    """
    descriptor: Any = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)

    def decode(raw: bytes) -> Any:
        try:
            if bounds is not None and descriptor is not None and len(raw) > _SMALL_BYTES:
                check_parts(raw, descriptor, bounds)
            return deserialize(raw)
        except TooManyPartsError as error:
            return Refusal(_too_many(error))
        except DecodeError:
            name = "message" if descriptor is None else descriptor.full_name
            return Refusal(
                UndecodableRequestError(
                    f"the request's {len(raw)} bytes are no {name}: check that client and server use the "
                    "same protos, and that text is UTF-8",
                    metadata={"field": "request", "type": name},
                )
            )

    return decode


def decoded(request: Any) -> Any:
    """The message; raises what its decoder refused it for."""
    if isinstance(request, Refusal):
        raise request.error
    return request


class DecodedStream:
    """The messages of a stream, as `decoded`. No generator, so a servicer may leave it half read."""

    def __init__(self, requests: AsyncIterable[Any]) -> None:
        self._requests = aiter(requests)

    def __aiter__(self) -> "DecodedStream":
        return self

    async def __anext__(self) -> Any:
        return decoded(await anext(self._requests))


def _too_many(error: TooManyPartsError) -> TooManyValuesError:
    more = "" if error.is_exact else " or more"
    return TooManyValuesError(
        f"{error.field} has {error.value} {error.what}{more}; this server's {error.limit} is "
        f"{error.maximum}: send less in one request",
        metadata={
            "field": error.field,
            "limit": error.limit,
            "value": str(error.value),
            "maximum": str(error.maximum),
        },
    )
