"""The two ZeroMQ sockets between front end and engine process, one direction each, in a private directory.

Receivers bind and senders connect: a sender then queues from the start, and so a send never blocks. There are
no high-water marks: admission limits bound what is queued.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import structlog
import zmq
import zmq.asyncio

from inference_service.engine.messages import FromEngine, ToEngine
from inference_service.engine.refused_message import refusal_of

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Endpoints:
    """ipc:// addresses; the directory they lie in is readable by this user only."""

    to_engine: str
    from_engine: str


class EngineSide:
    """The engine process's ends. One thread, the engine loop."""

    def __init__(self, endpoints: Endpoints, wake_fds: Sequence[int]) -> None:
        self._context = zmq.Context(io_threads=1)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.bind(endpoints.to_engine)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set_hwm(0)
        self._outbox.connect(endpoints.from_engine)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        for fd in wake_fds:
            self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_s: float) -> frozenset[int]:
        """Sleep until a message is there, a wake-up descriptor is readable or time is up.

        Returns the wake-up descriptors that are readable.
        """
        ready = self._poller.poll(max(0, int(timeout_s * 1000)))
        return frozenset(source for source, _ in ready if isinstance(source, int))

    def receive(self) -> list[ToEngine]:
        """All messages that are there; never blocks.

        One that cannot be decoded is refused where somebody waits for its answer, and dropped otherwise: it
        is one caller's trouble, and ending the engine over it would make it everybody's.
        """
        messages: list[ToEngine] = []
        while True:
            try:
                frame = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(self._decoder.decode(frame))
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                refusal = refusal_of(frame)
                log.exception("engine.message_refused", error=str(error), is_answered=refusal is not None)
                if refusal is not None:
                    self.send(refusal)

    def send(self, message: FromEngine) -> None:
        """Queue a message; never blocks."""
        self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self, linger_ms: int) -> None:
        """Give what is queued `linger_ms` to leave, then close."""
        self._inbox.close(linger=0)
        self._outbox.close(linger=linger_ms)
        self._context.term()


class FrontSide:
    """The front end's ends. One event loop."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._context = zmq.asyncio.Context(io_threads=1)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.bind(endpoints.from_engine)
        # A plain socket: sends happen in `finally` blocks, where nothing may be awaited.
        self._plain = zmq.Context(self._context)
        self._outbox = self._plain.socket(zmq.PUSH)
        self._outbox.set_hwm(0)
        self._outbox.connect(endpoints.to_engine)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    async def receive(self) -> FromEngine:
        """The next message."""
        return self._decoder.decode(await self._inbox.recv())

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks, whether the engine process lives or not."""
        self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Drop what is queued and close."""
        self._inbox.close(linger=0)
        self._outbox.close(linger=0)
        self._context.term()
