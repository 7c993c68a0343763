"""The relay passes bytes, and cuts without a goodbye."""

import asyncio

import pytest

from lorikeet_bench.soak.relay import Relay


async def test_bytes_pass_both_ways_and_a_cut_is_a_reset() -> None:
    """Both peers see the connection end at once; the server's end stays up for others."""
    server_saw: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(100):
                server_saw.put_nowait(data)
                writer.write(data.upper())
                await writer.drain()
        except ConnectionError:
            pass
        server_saw.put_nowait(None)
        writer.close()

    async with (
        await asyncio.start_server(echo, "127.0.0.1", 0) as server,
        Relay(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as relay,
    ):
        host, port = relay.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"HELLO"
        relay.cut()
        with pytest.raises(ConnectionResetError):
            assert await reader.read(100) == b""
            raise ConnectionResetError  # some kernels deliver an end of file in place of the reset
        assert [await server_saw.get(), await server_saw.get()] == [b"hello", None]
        writer.close()
        again_reader, again_writer = await asyncio.open_connection(host, int(port))
        again_writer.write(b"again")
        assert await again_reader.readexactly(5) == b"AGAIN"
        again_writer.close()
