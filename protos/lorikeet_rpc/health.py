"""grpc.health.v1 for asyncio, with watches that hold for any number of watchers.

grpcio-health-checking's own asyncio servicer (1.81) forgets a service's remaining watchers when the first of
them leaves, and keeps an entry for every name that anybody ever asked for.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

Status = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """The health of the whole server ("") and of each of its services; NOT_SERVING to begin with."""

    def __init__(self, service_names: Iterable[str]) -> None:
        self._statuses = dict.fromkeys(("", *service_names), Status.NOT_SERVING)
        self._changed = asyncio.Condition()
        self._is_shutting_down = False

    async def set_all(self, *, serving: bool) -> None:
        """Set every status; without effect once the server shuts down."""
        if not self._is_shutting_down:
            status = Status.SERVING if serving else Status.NOT_SERVING
            self._statuses = dict.fromkeys(self._statuses, status)
            async with self._changed:
                self._changed.notify_all()

    async def enter_graceful_shutdown(self) -> None:
        """NOT_SERVING for good."""
        await self.set_all(serving=False)
        self._is_shutting_down = True

    async def Check(  # noqa: N802 (named by the proto)
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """The status now; NOT_FOUND for a service that is not here, as the protocol says."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return Status(status=status)

    async def Watch(  # noqa: N802 (named by the proto)
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002 (the generated interface)
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now and whenever it changes; SERVICE_UNKNOWN for a service that is not here."""
        shown = None
        while True:
            status = self._statuses.get(request.service, Status.SERVICE_UNKNOWN)
            if status != shown:
                shown = status
                yield Status(status=status)
            async with self._changed:
                await self._changed.wait_for(
                    lambda: self._statuses.get(request.service, Status.SERVICE_UNKNOWN) != shown  # noqa: B023
                )
