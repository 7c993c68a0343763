"""InferenceService on the wire: convert, call, convert."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, ParamSpec, TypeVar

import grpc.aio

from inference_service.api import convert
from inference_service.api.convert_prompt import tokenize_prompt
from inference_service.api.generation_request import RequestRules
from inference_service.api.generation_service import GenerationService
from inference_service.ports import Engine
from inference_service.text.sampling_defaults import SamplingDefaults
from lorikeet.inference.v1 import generation_pb2, inference_service_pb2_grpc, model_pb2
from lorikeet_rpc.interceptors import current_principal

# Some milliseconds of making messages.
_INLINE_BYTES = 16 << 10

Arguments = ParamSpec("Arguments")
Reply = TypeVar("Reply")
Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_service_pb2_grpc.InferenceServiceServicer):
    """Errors become statuses in the interceptor, which also knows the caller."""

    def __init__(self, service: GenerationService, engine: Engine, defaults: SamplingDefaults) -> None:
        self._service = service
        self._engine = engine
        self._defaults = defaults

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Stream text as it is made."""
        parsed = convert.generation_request(request, self._rules())
        sequence = 0
        stream = self._service.stream(parsed, current_principal(), _time_remaining_s(context))
        async with aclosing(stream) as pieces:
            async for request_id, piece in pieces:
                yield await _made(
                    piece.max_wire_bytes, convert.generate_response, request_id, sequence, piece
                )
                sequence += 1

    async def Complete(
        self, request: generation_pb2.CompleteRequest, context: Context
    ) -> generation_pb2.CompleteResponse:
        """The same in one reply."""
        parsed = convert.generation_request(request.request, self._rules())
        request_id, pieces = await self._service.complete(
            parsed, current_principal(), _time_remaining_s(context)
        )
        size = sum(piece.max_wire_bytes for piece in pieces)
        return await _made(size, convert.complete_response, request_id, pieces)

    async def Abort(
        self, request: generation_pb2.AbortRequest, context: Context
    ) -> generation_pb2.AbortResponse:
        """Stop a running request of the same tenant."""
        aborted = self._service.abort(convert.request_id(request.request_id), current_principal())
        return generation_pb2.AbortResponse(aborted=aborted)

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: Context
    ) -> generation_pb2.TokenizeResponse:
        """Token ids of a text or a chat."""
        ids, token_bytes, rendered = await self._service.tokenize(tokenize_prompt(request))
        return await _made(20 * len(ids), convert.tokenize_response, ids, token_bytes, rendered)

    async def GetModel(
        self, request: model_pb2.GetModelRequest, context: Context
    ) -> model_pb2.GetModelResponse:
        """The model, its limits, its LoRA sites and the engine's counters."""
        status = await self._engine.status()
        return convert.model_response(self._engine.info, self._engine.instance_id, status)

    def _rules(self) -> RequestRules:
        return RequestRules(self._engine.info, self._defaults)


async def _made(
    num_bytes: int, make: Callable[Arguments, Reply], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Reply:
    """A reply; a large one on a thread, where making it lets the event loop in between."""
    if num_bytes <= _INLINE_BYTES:
        return make(*args, **kwargs)
    return await asyncio.to_thread(make, *args, **kwargs)


def _time_remaining_s(context: Context) -> float | None:
    remaining: Any = context.time_remaining()  # None without a deadline, whatever the stub says
    return remaining
