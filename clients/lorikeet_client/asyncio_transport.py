"""Runs calls over asyncio channels. For the asyncio client alone."""

import asyncio
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message
from tenacity import AsyncRetrying

from lorikeet.inference.v1 import generation_pb2
from lorikeet_client.adapters import UploadResult
from lorikeet_client.blocking_transport import BlockingTransport
from lorikeet_client.calls import Call, Service
from lorikeet_client.endpoints import Endpoints
from lorikeet_client.errors import mapped_errors
from lorikeet_client.retry import Budget, RetryPolicy, retry_arguments, server_says_when
from lorikeet_client.upload import UploadPlan
from lorikeet_rpc.channel import open_channel

ResponseT = TypeVar("ResponseT", bound=Message)
ResultT = TypeVar("ResultT")


class AsyncioTransport:
    """Channels to both services, opened on first use because they belong to the loop that runs then."""

    def __init__(self, endpoints: Endpoints, retry: RetryPolicy) -> None:
        self._endpoints = endpoints
        self._retry = retry
        self._channels: dict[Service, grpc.aio.Channel] = {}

    async def close(self) -> None:
        """Close the channels; running calls are cancelled."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def unary(self, call: Call[ResponseT, ResultT], timeout_s: float | None) -> ResultT:
        """Run a call, again where that helps and does no harm."""
        timeout_s = call.timeout_s if timeout_s is None else timeout_s
        budget = Budget.start(timeout_s)
        method: Any = self._channel(call.service).unary_unary(
            call.path, type(call.request).SerializeToString, call.response_type.FromString
        )

        async def attempt() -> ResponseT:
            with mapped_errors():
                return await method(call.request, timeout=budget.left_s())

        if not call.idempotent:
            return call.result(await attempt())
        attempts = AsyncRetrying(**retry_arguments(self._retry, server_says_when, timeout_s))
        return call.result(await attempts(attempt))

    def generate(self, request: generation_pb2.GenerateRequest, timeout_s: float | None) -> Any:
        """Start a stream: a call whose `read` gives the messages."""
        method: Any = self._channel(Service.INFERENCE).unary_stream(
            f"/{Service.INFERENCE}/Generate",
            generation_pb2.GenerateRequest.SerializeToString,
            generation_pb2.GenerateResponse.FromString,
        )
        return method(request, timeout=timeout_s)

    async def upload(self, plan: UploadPlan, timeout_s: float | None) -> UploadResult:
        """Send what the server lacks; after a break, go on where it stopped.

        On a blocking channel in a thread: where a server answers before the last chunk, a refusal say,
        grpc.aio fails the chunk in flight and puts INTERNAL over the server's own status.
        """
        blocking = BlockingTransport(self._endpoints, self._retry)
        try:
            return await asyncio.to_thread(blocking.upload, plan, timeout_s)
        finally:
            blocking.close()  # ends the thread's call if this task was cancelled

    def _channel(self, service: Service) -> grpc.aio.Channel:
        if service not in self._channels:
            at = self._endpoints
            self._channels[service] = open_channel(at.target(service), token=at.token, tls=at.tls, aio=True)
        return self._channels[service]
