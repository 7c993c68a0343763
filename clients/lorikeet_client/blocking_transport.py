"""Runs calls over blocking channels. For the blocking client alone."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from tenacity import Retrying

from lorikeet.adapters.v1 import adapter_pb2
from lorikeet.inference.v1 import generation_pb2
from lorikeet_client import adapter_calls, adapter_messages
from lorikeet_client.adapters import UploadResult
from lorikeet_client.calls import Call, Service
from lorikeet_client.endpoints import Endpoints
from lorikeet_client.errors import CallError, NotFoundError, UploadRefusedError, mapped_errors
from lorikeet_client.retry import (
    Budget,
    OnRetry,
    RetryPolicy,
    ignore_retry,
    is_unavailable,
    retry_arguments,
    server_says_when,
)
from lorikeet_client.upload import UploadPlan
from lorikeet_rpc.channel import open_channel

ResponseT = TypeVar("ResponseT", bound=Message)
ResultT = TypeVar("ResultT")


class BlockingTransport:
    """Channels to both services; safe to use from several threads."""

    def __init__(self, endpoints: Endpoints, retry: RetryPolicy) -> None:
        self._retry = retry
        self._channels = {
            service: open_channel(
                endpoints.target(service), token=endpoints.token, tls=endpoints.tls, aio=False
            )
            for service in Service
        }

    def close(self) -> None:
        """Close the channels; running calls are cancelled."""
        for channel in self._channels.values():
            channel.close()

    def unary(
        self, call: Call[ResponseT, ResultT], timeout_s: float | None, on_retry: OnRetry = ignore_retry
    ) -> ResultT:
        """Run a call, again where that helps and does no harm."""
        timeout_s = call.timeout_s if timeout_s is None else timeout_s
        budget = Budget.start(timeout_s)
        method = self._channels[call.service].unary_unary(
            call.path, type(call.request).SerializeToString, call.response_type.FromString
        )

        def attempt() -> ResponseT:
            with mapped_errors():
                return method(call.request, timeout=budget.left_s())

        if not call.idempotent:
            return call.result(attempt())
        attempts = Retrying(**retry_arguments(self._retry, server_says_when, timeout_s, on_retry))
        return call.result(attempts(attempt))

    def generate(self, request: generation_pb2.GenerateRequest, timeout_s: float | None) -> Any:
        """Start a stream: an iterator of messages that is also the call."""
        method = self._channels[Service.INFERENCE].unary_stream(
            f"/{Service.INFERENCE}/Generate",
            generation_pb2.GenerateRequest.SerializeToString,
            generation_pb2.GenerateResponse.FromString,
        )
        return method(request, timeout=timeout_s)

    def upload(self, plan: UploadPlan, timeout_s: float | None) -> UploadResult:
        """Send what the server lacks; after a break, go on where it stopped."""
        budget = Budget.start(timeout_s)
        attempts = Retrying(**retry_arguments(self._retry, is_unavailable, timeout_s, plan.on_retry))
        for attempt in attempts:
            with attempt:
                again = attempt.retry_state.attempt_number > 1
                received = self._received(plan, budget) if plan.resume or again else {}
                return self._send(plan, received, budget)
        raise AssertionError("tenacity returns or raises")

    def _received(self, plan: UploadPlan, budget: Budget) -> dict[str, int]:
        try:
            call = adapter_calls.get_upload(plan.header.adapter, plan.header.request_id)
            return self.unary(call, budget.left_s(), plan.on_retry)
        except NotFoundError:
            return {}

    def _send(self, plan: UploadPlan, received: dict[str, int], budget: Budget) -> UploadResult:
        method = self._channels[Service.ADAPTERS].stream_unary(
            f"/{Service.ADAPTERS}/Upload",
            adapter_pb2.UploadRequest.SerializeToString,
            adapter_pb2.UploadResponse.FromString,
        )
        feed = _Feed(plan.requests(received))
        call = method.future(feed, timeout=budget.left_s())
        feed.on_refusal = call.cancel
        try:
            with mapped_errors():
                return adapter_messages.upload_result(call.result())
        except (grpc.FutureCancelledError, CallError):
            if feed.refusal is not None:
                raise feed.refusal from None
            raise
        finally:
            call.cancel()  # Ctrl-C while waiting; an ended call is left as it is.


class _Feed:
    """Iterates requests for gRPC's own thread, which would only log what is raised there.

    A refusal cancels the call and is kept for the thread that waits for it.
    """

    def __init__(self, requests: Iterator[adapter_pb2.UploadRequest]) -> None:
        self._requests = requests
        self.refusal: UploadRefusedError | None = None
        self.on_refusal: Callable[[], object] = lambda: None

    def __iter__(self) -> Iterator[adapter_pb2.UploadRequest]:
        return self

    def __next__(self) -> adapter_pb2.UploadRequest:
        try:
            return next(self._requests)
        except UploadRefusedError as error:
            self.refusal = error
            self.on_refusal()
            raise StopIteration from None
