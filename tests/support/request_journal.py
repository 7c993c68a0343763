"""What a client saw of its generations, counted as the node's metrics count them."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc

from lorikeet.inference.v1 import generation_pb2 as pb
from lorikeet_rpc.errors import from_rpc_error
from tests.support.stack import Stack, make_request, rest_of

_CODES_WITHOUT_A_WORD = {
    grpc.StatusCode.CANCELLED: "cancelled",
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline",
}
_FROM_BELOW = {pb.ADAPTER_TIER_ABSENT, pb.ADAPTER_TIER_DISK}


@dataclass
class Journal:
    """Add to it by `stream` and `complete`; every call counts once."""

    stack: Stack
    finished: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_tokens: int = 0
    ended_by_engine: int = 0
    reads: int = 0
    copies: int = 0

    async def stream(self, prompt: list[int], *, read: list[Any] | None = None, **options: Any) -> str:
        """Generate to its end, whatever that is; returns the finish reason or the error's."""
        call, num_tokens, finish = self.call(prompt, **options), 0, None
        try:
            async for piece in rest_of(call):
                num_tokens += len(piece.tokens)
                if read is not None:
                    read.append(piece)
                if piece.HasField("finish"):
                    finish = piece.finish
        except grpc.aio.AioRpcError as error:
            if finish is None:
                return self._failed(error, prompt, num_tokens)
            self.codes[error.code().name] += 1
        else:
            self.codes["OK"] += 1
        assert finish is not None
        return self._ended(finish, num_tokens)

    async def complete(self, prompt: list[int], **options: Any) -> str:
        """The same in one reply."""
        request = pb.CompleteRequest(request=make_request(prompt, **options))
        try:
            reply = await self.stack.inference().Complete(request, metadata=self.stack.auth(), timeout=60)
        except grpc.aio.AioRpcError as error:
            return self._failed(error, prompt, 0)
        self.codes["OK"] += 1
        return self._ended(reply.finish, len(reply.tokens))

    def call(
        self, prompt: list[int], *, token: str | None = None, timeout_s: float = 60, **options: Any
    ) -> Any:
        """A stream that the caller reads; not counted."""
        request = make_request(prompt, **options)
        return self.stack.inference().Generate(request, metadata=self.stack.auth(token), timeout=timeout_s)

    def cancelled(self, prompt: list[int], num_tokens: int) -> None:
        """A call that the caller cancelled after it read this many tokens and before there were more."""
        self.codes["CANCELLED"] += 1
        self._ran("cancelled", len(prompt), num_tokens)

    def _failed(self, error: grpc.aio.AioRpcError, prompt: list[int], num_tokens: int) -> str:
        self.codes[error.code().name] += 1
        reason = from_rpc_error(error).reason
        ran = "failed" if num_tokens else None
        if reason == error.code().name:  # the transport's: no ErrorInfo
            ran = _CODES_WITHOUT_A_WORD.get(error.code(), ran)
        if ran is None:
            self.rejected[reason] += 1
        else:
            self._ran(ran, len(prompt), num_tokens)
        return reason

    def _ended(self, finish: pb.Finish, num_tokens: int) -> str:
        reason = pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
        usage = finish.usage
        assert usage.output_tokens == num_tokens
        self._ran(reason, usage.prompt_tokens, num_tokens)
        self.cached_tokens += usage.cached_tokens
        self.ended_by_engine += 1
        if finish.HasField("adapter"):
            self.reads += finish.adapter.tier_hit in _FROM_BELOW
            self.copies += finish.adapter.tier_hit in {*_FROM_BELOW, pb.ADAPTER_TIER_HOST}
        return reason

    def _ran(self, reason: str, prompt_tokens: int, num_tokens: int) -> None:
        self.finished[reason] += 1
        self.prompt_tokens += prompt_tokens
        self.output_tokens += num_tokens
        self.first_tokens += num_tokens > 0
