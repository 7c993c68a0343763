"""Accept headers, snapshots of a loop, and the endpoint's address."""

import asyncio
import re
import socket
import struct
import time
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from lorikeet_rpc.loop_snapshot import LoopSnapshot
from lorikeet_rpc.metrics_endpoint import MetricsEndpoint, kept, split_address
from lorikeet_rpc.server import ListenError


@pytest.mark.parametrize(
    ("asked", "served"),
    [
        ("", ""),
        ("*/*", "*/*"),
        ("text/html, */*;q=0.1", "text/html, */*;q=0.1"),
        ("text/plain", "text/plain"),
        ("text/plain;version=0.0.4", "text/plain; version=0.0.4; escaping=allow-utf-8"),
        ("text/plain; version=1.0.0; escaping=dots", "text/plain; version=1.0.0; escaping=allow-utf-8"),
        (
            "application/openmetrics-text",
            "application/openmetrics-text; version=1.0.0; escaping=allow-utf-8",
        ),
        (
            "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.5,text/plain",
            "application/openmetrics-text; version=1.0.0; q=0.5; escaping=allow-utf-8,text/plain",
        ),
    ],
)
def test_formats_are_kept_and_escaping_is_not(asked: str, served: str) -> None:
    """Whatever a scraper asks for, names stay as they are."""
    assert kept(asked) == served


@pytest.mark.parametrize("address", ["9400", "localhost", "host:port", ":9400", "", "host:65536", "host:-1"])
def test_addresses_that_are_none(address: str) -> None:
    """Said before anything listens."""
    with pytest.raises(ValueError, match=r"host:port"):
        MetricsEndpoint(address, CollectorRegistry())


def test_a_port_that_is_taken_is_named() -> None:
    """And one that is free is served, over IPv6 as well where the machine has it."""
    first = MetricsEndpoint("127.0.0.1:0", CollectorRegistry())
    try:
        address = f"127.0.0.1:{first.port}"
        with pytest.raises(ListenError, match=re.escape(address)):
            MetricsEndpoint(address, CollectorRegistry())
    finally:
        first.close()
    assert split_address("[::1]:9400") == ("::1", 9400)
    assert split_address("::1:9400") == ("::1", 9400)


def test_peers_that_vanish_leave_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    """One says nothing, one leaves in the middle of its request, one resets: all are dropped, in silence."""
    endpoint = MetricsEndpoint("127.0.0.1:0", CollectorRegistry(), idle_s=0.1)
    address = ("127.0.0.1", endpoint.port)
    try:
        silent = socket.create_connection(address, timeout=30)
        silent.sendall(b"GET /met")
        with socket.create_connection(address, timeout=30) as leaving:
            leaving.sendall(b"GET /metrics HTTP/1.1\r\n")
        with socket.create_connection(address, timeout=30) as resetting:
            resetting.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            resetting.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert silent.recv(1) == b"", "dropped"
        silent.close()
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=30) as answer:
            assert answer.status == 200
    finally:
        endpoint.close()
    assert capfd.readouterr() == ("", "")


async def test_a_snapshot_is_fresh_where_the_loop_answers() -> None:
    """Each `get` makes one."""
    numbers = iter(range(100))

    async def make() -> int:
        return next(numbers)

    snapshot = LoopSnapshot(make, -1)
    for expected in range(3):
        value, age_s = await asyncio.to_thread(snapshot.get)
        assert value == expected
        assert 0 <= age_s < 30


async def test_readers_share_what_is_being_made() -> None:
    """Ten at once ask once, get the last value in time, and the new one when it is there."""
    num_made = 0
    is_free = asyncio.Event()

    async def make() -> int:
        nonlocal num_made
        num_made += 1
        await is_free.wait()
        return num_made

    snapshot = LoopSnapshot(make, 0, patience_s=0.2)
    begun_s = time.monotonic()
    answers = await asyncio.gather(*(asyncio.to_thread(snapshot.get) for _ in range(10)))
    assert [value for value, _ in answers] == [0] * 10
    assert all(age_s >= 0.2 for _, age_s in answers)
    assert time.monotonic() - begun_s < 60
    assert num_made == 1
    is_free.set()
    assert (await asyncio.to_thread(snapshot.get))[0] in {1, 2}


async def test_a_loop_that_ended_leaves_its_last_value() -> None:
    """A scrape during shutdown gets an answer."""

    async def make() -> str:
        return "last"

    def life() -> LoopSnapshot[str]:
        async def run() -> LoopSnapshot[str]:
            snapshot = LoopSnapshot(make, "first")
            await asyncio.to_thread(snapshot.get)
            return snapshot

        return asyncio.run(run())

    snapshot = await asyncio.to_thread(life)
    assert (await asyncio.to_thread(snapshot.get))[0] == "last"
