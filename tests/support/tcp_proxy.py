"""A TCP proxy that does what networks do: swallow, delay, cut, refuse; and that holds one chosen message.

A blackhole ends no connection, so neither side learns of it: the half-open drop that kills naive listeners.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

_READ_BYTES = 1 << 20
# How far back of the present chunk a held message's marks may lie.
_TAIL_BYTES = 1 << 18


class Where(Enum):
    """Where a message is held."""

    BEFORE = "not a byte of it is forwarded"
    MIDDLE = "half of the chunk that completes it is forwarded"
    REPLY = "it is forwarded; the next reply on its connection is held"


@dataclass
class Gate:
    """Holds the first message from the client that contains all `marks`, until `release`."""

    marks: Sequence[bytes]
    where: Where
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def release(self) -> None:
        """Let it go on, into whatever the proxy does by then."""
        self.released.set()


class TcpProxy:
    """Forwards connections to 127.0.0.1:`target_port`. Start, then use `port` instead of the target's."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.delay_s = 0.0
        # Of each connection's next reply, forward only so many bytes and then close it.
        self.cut_after_bytes: int | None = None
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._gates: list[Gate] = []
        self._open = asyncio.Event()  # cleared while it is a blackhole
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        # Connections that were open in a blackhole stay dead: what was swallowed is missing in their streams.
        self._doomed: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen; the port stays the same over `refuse` and `accept`."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop, and close all connections."""
        await self.refuse()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hold(self, *marks: bytes, where: Where = Where.BEFORE) -> Gate:
        """Hold the next message from a client that contains all marks."""
        gate = Gate(marks, where)
        self._gates.append(gate)
        return gate

    def blackhole(self) -> None:
        """Swallow everything from now on, in both directions; nothing is closed."""
        self._open.clear()
        self._doomed |= self._writers

    def clear(self) -> None:
        """End blackhole, delay and cuts. The blackhole's connections stay silent until their owners leave."""
        self.delay_s, self.cut_after_bytes = 0.0, None
        self._open.set()

    async def refuse(self) -> None:
        """Close the port and reset all connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()

    async def accept(self) -> None:
        """Listen again."""
        if self._server is None:
            await self.start()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            await (
                self._open.wait()
            )  # a connection made in a blackhole is accepted by the kernel, and that is all
            try:
                upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self._target_port)
            except OSError:
                return
            self._writers.add(upstream)
            replies = asyncio.Queue[Gate]()
            pumps = [
                asyncio.create_task(self._requests(reader, upstream, writer, replies)),
                asyncio.create_task(self._replies(upstream_reader, writer, replies)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                self._drop(upstream)
        except asyncio.CancelledError:
            pass  # the proxy is being closed; asyncio would report a server's cancelled callback as an error
        finally:
            self._drop(writer)
            self._tasks.discard(task)

    async def _requests(
        self,
        reader: asyncio.StreamReader,
        upstream: asyncio.StreamWriter,
        writer: asyncio.StreamWriter,
        replies: "asyncio.Queue[Gate]",
    ) -> None:
        tail = b""
        while data := await reader.read(_READ_BYTES):
            # A Redis command begins with an asterisk: marks of two commands must not add up to one match.
            # In other protocols they may, so give one mark there.
            tail = data if data.startswith(b"*") else (tail + data)[-_TAIL_BYTES:]
            gate = self._gate_for(tail)
            if gate and gate.where is Where.REPLY:
                replies.put_nowait(gate)
            elif gate:
                half = len(data) // 2 if gate.where is Where.MIDDLE else 0
                await self._forward(data[:half], upstream, writer)
                data = data[half:]
                gate.reached.set()
                await gate.released.wait()
            await self._forward(data, upstream, writer)

    async def _replies(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, replies: "asyncio.Queue[Gate]"
    ) -> None:
        while data := await reader.read(_READ_BYTES):
            if not replies.empty():
                gate = replies.get_nowait()
                gate.reached.set()
                await gate.released.wait()
                if reader.at_eof():  # its sender died meanwhile, and the reply with it
                    return
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self.cut_after_bytes is not None:
                await self._forward(data[: self.cut_after_bytes], writer, writer)
                return
            await self._forward(data, writer, writer)
        if writer in self._doomed:  # the target's end is swallowed too
            await asyncio.Event().wait()

    async def _forward(self, data: bytes, to: asyncio.StreamWriter, client: asyncio.StreamWriter) -> None:
        if not self._open.is_set() or client in self._doomed or not data:
            return
        with contextlib.suppress(OSError):
            to.write(data)
            await to.drain()

    def _gate_for(self, data: bytes) -> Gate | None:
        for gate in self._gates:
            if all(mark in data for mark in gate.marks):
                self._gates.remove(gate)
                return gate
        return None

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        self._doomed.discard(writer)
        with contextlib.suppress(OSError):
            writer.close()
