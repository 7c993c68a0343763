"""Runs calls over asyncio channels. For the asyncio client alone."""

import asyncio
import contextlib
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message
from tenacity import AsyncRetrying

from lorikeet.adapters.v1 import adapter_pb2
from lorikeet.inference.v1 import generation_pb2
from lorikeet_client import adapter_calls, adapter_messages
from lorikeet_client.adapters import UploadResult
from lorikeet_client.calls import Call, Service
from lorikeet_client.endpoints import Endpoints
from lorikeet_client.errors import NotFoundError, mapped_errors
from lorikeet_client.retry import Budget, RetryPolicy, is_unavailable, retry_arguments, server_says_when
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
        """Send what the server lacks; after a break, go on where it stopped."""
        budget = Budget.start(timeout_s)
        async for attempt in AsyncRetrying(**retry_arguments(self._retry, is_unavailable, timeout_s)):
            with attempt:
                again = attempt.retry_state.attempt_number > 1
                received = await self._received(plan, budget) if plan.resume or again else {}
                return await self._send(plan, received, budget)
        raise AssertionError("tenacity returns or raises")

    def _channel(self, service: Service) -> grpc.aio.Channel:
        if service not in self._channels:
            at = self._endpoints
            self._channels[service] = open_channel(at.target(service), token=at.token, tls=at.tls, aio=True)
        return self._channels[service]

    async def _received(self, plan: UploadPlan, budget: Budget) -> dict[str, int]:
        try:
            return await self.unary(
                adapter_calls.get_upload(plan.header.adapter, plan.header.request_id), budget.left_s()
            )
        except NotFoundError:
            return {}

    async def _send(self, plan: UploadPlan, received: dict[str, int], budget: Budget) -> UploadResult:
        method: Any = self._channel(Service.ADAPTERS).stream_unary(
            f"/{Service.ADAPTERS}/Upload",
            adapter_pb2.UploadRequest.SerializeToString,
            adapter_pb2.UploadResponse.FromString,
        )
        call = method(timeout=budget.left_s())
        requests = plan.requests(received)
        try:
            with mapped_errors():
                # InvalidStateError: the server has answered early, and its answer is in the call.
                with contextlib.suppress(asyncio.InvalidStateError):
                    # Files are read on a thread: a slow disk must not stop the loop.
                    while (request := await asyncio.to_thread(next, requests, None)) is not None:
                        await call.write(request)
                    await call.done_writing()
                return adapter_messages.upload_result(await call)
        finally:
            call.cancel()
