"""The one interceptor of each server: request id, authentication, log context, errors to statuses, log line.

It covers unary and streaming calls in both directions. Health and reflection pass through it untouched.
"""

import asyncio
import inspect
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import structlog

from lorikeet_contract.status import ServiceError, StatusCode
from lorikeet_rpc.decoding import DecodedStream, decoded, decoder
from lorikeet_rpc.errors import UnexpectedError, as_service_error, to_status
from lorikeet_rpc.logs import escape_controls
from lorikeet_rpc.metrics import CallEnd, CallObserver
from lorikeet_rpc.wire_count import WireBounds

REQUEST_ID_HEADER = "x-request-id"
_MAX_REQUEST_ID_LENGTH = 128
# What a call may need to get from a busy machine's client to our clock.
_TRANSIT_S = 0.1
_OPEN_SERVICES = ("/grpc.health.", "/grpc.reflection.")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls: the tenant of the verified token. `token_id` is safe to log."""

    tenant: str
    is_admin: bool = False
    token_id: str = ""


Authenticate = Callable[[str | None, str], Principal]
"""(bearer token or None, full method name) -> Principal; raises a ServiceError to refuse."""


@dataclass(slots=True)
class _Call:
    """What one call's `request.finished` line will say."""

    method: str
    request_id: str
    started_s: float
    # What it is if nothing else is recorded: the client went away.
    code: StatusCode | None = StatusCode.CANCELLED
    principal: Principal | None = None
    facts: dict[str, Any] = field(default_factory=dict)


_current: ContextVar[_Call] = ContextVar("lorikeet_rpc_call")


def current_principal() -> Principal:
    """The caller of the RPC being served; LookupError outside of one."""
    principal = _current.get().principal
    if principal is None:
        raise LookupError("the call is not authenticated yet")
    return principal


def current_request_id() -> str:
    """The id of the RPC being served, the client's own or a fresh one."""
    return _current.get().request_id


def request_facts() -> dict[str, Any]:
    """What this call's `request.finished` line will say beside its own; add to it. Never prompts or answers.

    Take it while the call runs normally: in a generator that is being closed, the context may be another
    call's. Outside of a call it is a dict that nobody reads.
    """
    record = _current.get(None)
    return {} if record is None else record.facts


def annotate_request(**facts: str | float | bool | None) -> None:
    """Add to `request_facts`."""
    request_facts().update(facts)


class RequestInterceptor(grpc.aio.ServerInterceptor):
    """See the module. One instance a server; it also knows how many calls are in flight.

    Args:
        authenticate: turns a bearer token into a Principal for a method, or raises a ServiceError.
        service: the process's name in log lines, e.g. "inference".
        metrics: hears of each call when it ended.
        endless: short names of methods that only end when the client leaves (watches); `idle` ignores them.
        bounds: of the parts of a message, by service ("/package.Service/"); other services have none.
    """

    def __init__(
        self,
        authenticate: Authenticate,
        service: str,
        *,
        metrics: CallObserver | None = None,
        endless: frozenset[str] = frozenset(),
        bounds: Mapping[str, WireBounds] | None = None,
    ) -> None:
        self._authenticate = authenticate
        self._service = service
        self._metrics = metrics
        self._endless = endless
        self._bounds = bounds or {}
        self._in_flight = 0
        self._became_idle = asyncio.Event()
        self._became_idle.set()

    async def idle(self) -> None:
        """Return when no call is in flight, watches aside; meant for a server that takes no new ones."""
        await self._became_idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the method's handler; None (no such method) stays None and becomes UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_OPEN_SERVICES):
            return handler
        metadata = {k: v for k, v in handler_call_details.invocation_metadata or () if isinstance(v, str)}
        if handler.response_streaming:
            behavior = handler.stream_stream if handler.request_streaming else handler.unary_stream
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            wrapped: Any = self._streaming(behavior, method, metadata)
        else:
            behavior = handler.stream_unary if handler.request_streaming else handler.unary_unary
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            wrapped = self._unary(behavior, method, metadata)
        decode = handler.request_deserializer
        if decode is not None:
            decode = decoder(decode, self._bounds.get(method.rpartition("/")[0] + "/"))
        return make(wrapped, decode, handler.response_serializer)

    def _unary(
        self, behavior: Callable[..., Any], method: str, metadata: dict[str, str]
    ) -> Callable[..., Any]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            record = self._begin(method, metadata)
            failure: ServiceError | None = None
            try:
                self._admit(record, metadata)
                result = behavior(_messages(request), context)
                response = await result if inspect.isawaitable(result) else result
                record.code = None  # gRPC's own: OK, unless the servicer set another
            except grpc.aio.AbortError:
                record.code = None
                raise
            except Exception as error:  # noqa: BLE001 (one of the two blanket handlers: every error gets a status)
                failure = self._fail(record, error)
            else:
                return response
            finally:
                self._end(record, context)
            return await _abort(context, failure, record)

        return call

    def _streaming(
        self, behavior: Callable[..., Any], method: str, metadata: dict[str, str]
    ) -> Callable[..., AsyncIterator[Any]]:
        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            record = self._begin(method, metadata)
            failure: ServiceError | None = None
            try:
                self._admit(record, metadata)
                # Closed here, not when the collector finds it: the servicer's `finally` frees the engine.
                async with aclosing(_responses(behavior, _messages(request), context)) as responses:
                    async for response in responses:
                        yield response
                record.code = None
            except grpc.aio.AbortError:
                record.code = None
                raise
            except Exception as error:  # noqa: BLE001 (see above)
                failure = self._fail(record, error)
            finally:
                self._end(record, context)
            if failure is not None:
                await _abort(context, failure, record)

        return stream

    def _begin(self, method: str, metadata: dict[str, str]) -> _Call:
        record = _Call(method, _request_id(metadata), time.perf_counter())
        _current.set(record)  # each RPC runs in a task of its own: nothing to reset
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=record.request_id)
        if self._short(method) not in self._endless:
            self._in_flight += 1
            self._became_idle.clear()
        return record

    def _admit(self, record: _Call, metadata: dict[str, str]) -> None:
        record.principal = self._authenticate(_bearer(metadata), record.method)
        structlog.contextvars.bind_contextvars(tenant=record.principal.tenant)

    def _fail(self, record: _Call, error: Exception) -> ServiceError:
        failure = as_service_error(error)
        record.code = failure.code
        record.facts["reason"] = failure.reason
        if isinstance(failure, UnexpectedError):
            record.facts["error_id"] = failure.error_id
            log.error(
                "request.failed",
                service=self._service,
                method=record.method,
                error_id=failure.error_id,
                exc_info=error,
            )
        return failure

    def _end(self, record: _Call, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Runs in `finally`, where a closing generator may have lost its context: explicit keys only."""
        if self._short(record.method) not in self._endless:
            self._in_flight -= 1
            if not self._in_flight:
                self._became_idle.set()
        seconds = time.perf_counter() - record.started_s
        code = _final_code(record, context)
        if self._metrics:
            reason = str(record.facts.get("reason", ""))
            self._metrics.finished(CallEnd(record.method, code, reason, seconds, record.facts))
        # Refused and failed calls stand out; a client that left is nobody's fault.
        emit = log.info if code in {"OK", "CANCELLED"} else log.warning
        emit(
            "request.finished",
            service=self._service,
            method=record.method,
            code=code,
            ms=round(seconds * 1000, 3),
            **{
                "request_id": record.request_id,
                "tenant": record.principal.tenant if record.principal else None,
                "token_id": record.principal.token_id if record.principal else None,
                **record.facts,
            },
        )

    @staticmethod
    def _short(method: str) -> str:
        return method.rpartition("/")[2]


def _messages(request: Any) -> Any:
    """One message or a stream of them, without refusals: those are raised."""
    return DecodedStream(request) if hasattr(request, "__aiter__") else decoded(request)


async def _responses(behavior: Callable[..., Any], request: Any, context: Any) -> AsyncGenerator[Any]:
    """Any way to write a streaming servicer method: async generator, context.write, plain iterator."""
    result = behavior(request, context)
    if hasattr(result, "__aiter__"):
        try:
            async for response in result:
                yield response
        finally:
            if inspect.isasyncgen(result):
                await result.aclose()
    elif inspect.isawaitable(result):
        await result
    else:
        for response in result:
            yield response


async def _abort(context: grpc.aio.ServicerContext[Any, Any], failure: ServiceError, record: _Call) -> Any:
    status = to_status(failure)
    trailing = (*status.trailing_metadata, (REQUEST_ID_HEADER, record.request_id))
    await context.abort(status.code, status.details, trailing)


def _final_code(record: _Call, context: grpc.aio.ServicerContext[Any, Any]) -> str:
    if record.code is StatusCode.CANCELLED:
        remaining: Any = context.time_remaining()  # None without a deadline, whatever the stub says
        passed_s = time.perf_counter() - record.started_s
        is_late = remaining is not None and remaining <= _deadline_slack_s(passed_s + remaining)
        return "DEADLINE_EXCEEDED" if is_late else "CANCELLED"
    if record.code is not None:
        return record.code.value
    code: Any = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else _code_name(code)


def _deadline_slack_s(timeout_s: float) -> float:
    """By how much a caller's deadline may come before ours.

    It cancels the call when its own clock says so. Ours began when the call arrived, and counts a timeout
    that gRPC rounded up to two or three digits for the way.
    """
    return _TRANSIT_S + timeout_s / 100


def _code_name(code: Any) -> str:
    """grpc.aio returns the bare number where the servicer set nothing."""
    return next((c.name for c in grpc.StatusCode if c.value[0] == code), "OK")


def _request_id(metadata: dict[str, str]) -> str:
    given = metadata.get(REQUEST_ID_HEADER, "")
    return escape_controls(given)[:_MAX_REQUEST_ID_LENGTH] if given else uuid.uuid4().hex


def _bearer(metadata: dict[str, str]) -> str | None:
    scheme, _, token = metadata.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None
