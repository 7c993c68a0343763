"""One unary RPC as a value: which method, what to send, what to make of the reply. Pure.

The blocking and the asyncio client both run these, so that requests are built and replies read in one place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from google.protobuf.message import Message

ResponseT = TypeVar("ResponseT", bound=Message)
ResultT = TypeVar("ResultT")


class Service(StrEnum):
    """The gRPC services, by full name."""

    INFERENCE = "lorikeet.inference.v1.InferenceService"
    ADAPTERS = "lorikeet.adapters.v1.AdapterService"
    TENANTS = "lorikeet.adapters.v1.TenantService"


@dataclass(frozen=True, slots=True)
class Call(Generic[ResponseT, ResultT]):
    """A unary call.

    `idempotent` allows another try where the server answers UNAVAILABLE and says when to come back.
    `timeout_s` is used where the caller gives none.
    """

    service: Service
    method: str
    request: Message
    response_type: type[ResponseT]
    result: Callable[[ResponseT], ResultT]
    idempotent: bool = True
    timeout_s: float | None = 30.0

    @property
    def path(self) -> str:
        """The method's path on the wire."""
        return f"/{self.service}/{self.method}"
