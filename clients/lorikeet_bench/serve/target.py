"""Requests of a load over gRPC.

The messages are kept as bytes and read when nothing is measured any more: reading them costs a client as much
as receiving them, and here it would be charged to the server.
"""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc.aio

from lorikeet.inference.v1 import generation_pb2 as pb
from lorikeet_bench.load.plan import PlannedRequest
from lorikeet_bench.load.prompts import TextPrompts, TokenPrompts
from lorikeet_bench.load.record import OK, RequestRecord
from lorikeet_client import ClientTls
from lorikeet_rpc.channel import DEFAULT_PING, Ping, open_channel

_METHOD = "/lorikeet.inference.v1.InferenceService/Generate"
# One connection carries all its streams in order; real loads come over many.
_CONNECTIONS = 4


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """A node, and as whom."""

    inference: str
    token: str = field(repr=False)
    tls: ClientTls | None = None


class GrpcTarget:
    """Streams greedy answers of planned lengths that ignore the model's ends.

    Implements `load.record.Target`.

    Args:
        node: where to.
        prompts: token ids or text.
        names: the adapters' names, counted as the plan does.
    """

    def __init__(self, node: NodeAddress, prompts: TokenPrompts | TextPrompts, names: Sequence[str]) -> None:
        self._node = node
        self._prompts = prompts
        self._names = names
        self._methods: list[Any] = []
        self._exit = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for number in range(_CONNECTIONS):
            # Channels of equal options share one connection.
            ping = Ping(every_s=DEFAULT_PING.every_s + number)
            channel = open_channel(
                self._node.inference, token=self._node.token, tls=self._node.tls, ping=ping, aio=True
            )
            self._exit.push_async_callback(channel.close)
            method: Any = channel.unary_stream(_METHOD, pb.GenerateRequest.SerializeToString, None)
            self._methods.append(method)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit.aclose()

    async def send(self, record: RequestRecord) -> None:
        """See `Target`."""
        call = self._methods[record.request.index % len(self._methods)](self._message(record))
        try:
            async for data in call:
                record.came_s.append(time.perf_counter())
                record.raw.append(data)
            record.status = OK
        except grpc.aio.AioRpcError as error:
            record.status, record.message = error.code().name, error.details() or ""

    def settle(self, record: RequestRecord) -> None:
        """See `Target`."""
        came_s, record.came_s = record.came_s, []
        finish = pb.Finish()
        for moment, data in zip(came_s, record.raw, strict=True):
            message = pb.GenerateResponse.FromString(data)
            if message.tokens:
                record.came_s.append(moment)
                record.counts.append(len(message.tokens))
                record.token_ids.extend(token.id for token in message.tokens)
            if message.HasField("finish"):
                finish = message.finish
        record.raw.clear()
        if not record.is_ok:
            return
        record.prompt_tokens = finish.usage.prompt_tokens
        record.answered_by = finish.adapter.digest if finish.HasField("adapter") else ""
        if finish.reason != pb.FINISH_REASON_LENGTH:
            record.status = pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_")

    def _message(self, record: RequestRecord) -> pb.GenerateRequest:
        request = record.request
        sampling = pb.SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True)
        message = pb.GenerateRequest(sampling=sampling, adapter=self._name(request))
        if isinstance(self._prompts, TextPrompts):
            message.prompt = self._prompts.text(request)
        else:
            record.prompt_token_ids = ids = self._prompts.ids(request)
            message.token_ids.ids.extend(ids)
        return message

    def _name(self, request: PlannedRequest) -> str | None:
        return None if request.adapter is None else self._names[request.adapter]
