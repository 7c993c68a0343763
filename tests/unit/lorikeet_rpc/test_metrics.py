"""Accept headers, snapshots of a loop, and the endpoint's address."""

import asyncio
import re
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from structlog.testing import capture_logs

from lorikeet_rpc.loop_snapshot import LoopSnapshot
from lorikeet_rpc.metrics_endpoint import ConnectionLimits, MetricsEndpoint, split_address
from lorikeet_rpc.metrics_format import OPENMETRICS, TEXT_0, TEXT_1, negotiated
from lorikeet_rpc.server import ListenError
from tests.support.scrapes import PROMETHEUS


class _Broken(Collector):
    """Fails when it is scraped, not when it is registered."""

    def describe(self) -> list[Metric]:
        """No names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Fail."""
        raise LookupError("broken")


@pytest.mark.parametrize(
    ("asked", "served"),
    [
        ("", TEXT_0),
        ("*/*", TEXT_0),
        ("text/html, */*;q=0.1", TEXT_0),
        ("text/plain", TEXT_0),
        ("text/plain;version=0.0.4", TEXT_0),
        ("text/plain;version=1e9", TEXT_0),
        ("text/plain; version=;;;", TEXT_0),
        ("text/plain; version=1.0.0; escaping=dots", TEXT_1),
        ("application/openmetrics-text", OPENMETRICS),
        ('Application/OpenMetrics-Text;Version="1.0.0"', OPENMETRICS),
        ('application/openmetrics-text;version="1.\\0.0"', OPENMETRICS),
        ('application/openmetrics-text;x="a,b;version=9";version=1.0.0', OPENMETRICS),
        ('application/openmetrics-text;version="1.0.0', TEXT_0),
        ("application/openmetrics-text;version=abc", TEXT_0),
        ("application/openmetrics-text;version=1.0.0-rc1", TEXT_0),
        ("application/openmetrics-text;version=2.0.0", TEXT_0),
        ("application/openmetrics-text;version=2.0.0, text/plain;version=1.0.0", TEXT_1),
        ("application/openmetrics-text;q=0", TEXT_0),
        ("application/openmetrics-text;q=0.0, */*", TEXT_0),
        ("application/openmetrics-text;q=much", TEXT_0),
        ("application/openmetrics-text;q=0.3,text/plain;q=0.4", TEXT_0),
        (
            "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.5,text/plain;q=0.2",
            OPENMETRICS,
        ),
        ("\xff\xfe;version=1", TEXT_0),
        (PROMETHEUS, OPENMETRICS),
    ],
)
def test_formats_are_negotiated_and_escaping_is_not(asked: str, served: str) -> None:
    """The format liked best of those that we have; whatever a scraper asks for, names stay as they are."""
    assert negotiated(asked) == served


@given(st.text(st.sampled_from(' ;,="\\/.*q01') | st.characters(max_codepoint=255)))
def test_no_header_is_too_odd(asked: str) -> None:
    """Whatever it is, there is a format."""
    assert negotiated(asked) in {TEXT_0, TEXT_1, OPENMETRICS}


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
    endpoint = MetricsEndpoint("127.0.0.1:0", CollectorRegistry(), limits=ConnectionLimits(idle_s=0.1))
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


def test_no_scrape_prints_anything(capfd: pytest.CaptureFixture[str]) -> None:
    """Every header is answered; a collector that fails is one event of the log."""
    registry = CollectorRegistry()
    endpoint = MetricsEndpoint("127.0.0.1:0", registry)
    url = f"http://127.0.0.1:{endpoint.port}/metrics"
    try:
        for accept in ('application/openmetrics-text;version="1.0.0"', "text/plain;version=abc"):
            with urllib.request.urlopen(
                urllib.request.Request(url, headers={"Accept": accept}), timeout=30
            ) as a:
                assert a.status == 200
        with capture_logs() as lines:
            registry.register(_Broken())
            with pytest.raises(urllib.error.HTTPError, match="500"):
                urllib.request.urlopen(url, timeout=30)
        assert [line["event"] for line in lines] == ["metrics.scrape_failed"]
    finally:
        endpoint.close()
    assert capfd.readouterr() == ("", "")


def test_who_drips_is_cut_in_time() -> None:
    """Never silent for long, and never done."""
    limits = ConnectionLimits(idle_s=60, total_s=0.5)
    endpoint = MetricsEndpoint("127.0.0.1:0", CollectorRegistry(), limits=limits)
    try:
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=0.1) as dripping:
            end_s = time.monotonic() + 60
            while True:
                assert time.monotonic() < end_s, "never cut"
                try:
                    dripping.sendall(b"x")
                    if not dripping.recv(1):
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
    finally:
        endpoint.close()


def test_threads_are_bounded_and_who_scrapes_gets_one() -> None:
    """Thirty that say nothing share four threads; the oldest give way."""
    limits = ConnectionLimits(idle_s=60, total_s=60, num_open=4)
    endpoint = MetricsEndpoint("127.0.0.1:0", CollectorRegistry(), limits=limits)
    num_before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", endpoint.port), timeout=60) for _ in range(30)]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=60) as answer:
            assert answer.status == 200
        assert threading.active_count() <= num_before + 4
        assert silent[0].recv(1) == b"", "cut"
    finally:
        for connection in silent:
            connection.close()
        endpoint.close()


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
