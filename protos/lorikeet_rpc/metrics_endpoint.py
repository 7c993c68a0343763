"""The HTTP endpoint that Prometheus and routers scrape."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import IO, Any, cast
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import CollectorRegistry, disable_created_metrics, make_wsgi_app

from lorikeet_rpc.metrics_format import negotiated
from lorikeet_rpc.server import ListenError

_MAX_PORT = 65_535
_MAX_LINE_BYTES = 65_536
_GIVE_WAY_S = 1.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a peer may take: silence at a time, time in all, and connections together with all others."""

    idle_s: float = 10.0
    total_s: float = 30.0
    num_open: int = 64


class MetricsEndpoint:
    """Serves a registry at `http://host:port/metrics`, on threads of its own; port 0 picks one.

    Peers that reach one of the limits are dropped.

    Raises:
        ValueError: the address is not host:port.
        ListenError: it cannot be listened on.
    """

    def __init__(
        self, address: str, registry: CollectorRegistry, *, limits: ConnectionLimits | None = None
    ) -> None:
        host, port = split_address(address)
        # When a counter was born doubles the number of series and is of use to few.
        disable_created_metrics()
        server_class = _Server6 if ":" in host else _Server
        try:
            self._server = server_class((host, port), limits or ConnectionLimits())
        except OSError as error:
            raise ListenError(f"cannot serve metrics on {address!r}: {error.strerror or error}") from error
        self._server.set_app(_negotiating(make_wsgi_app(registry)))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving; returns when the thread ended."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[host]:port"; raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _MAX_PORT:
        raise ValueError(f"metrics address {address!r} is not host:port, e.g. 127.0.0.1:9400")
    return host.removeprefix("[").removesuffix("]"), int(port)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], limits: ConnectionLimits) -> None:
        self._limits = limits
        self._free = threading.BoundedSemaphore(limits.num_open)
        self._lock = threading.Lock()
        self._born_s: dict[socket.socket, float] = {}  # oldest first
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection that may not be idle for ever."""
        connection, peer = super().get_request()
        connection.settimeout(self._limits.idle_s)
        return connection, peer

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give it a thread; where all are taken, the one that has had its thread longest must give way."""
        if not self._free.acquire(blocking=False):
            with self._lock:
                oldest = next(iter(self._born_s), None)
            if oldest is not None:
                _cut(oldest)
            if not self._free.acquire(timeout=_GIVE_WAY_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._born_s[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system has no thread to give
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def service_actions(self) -> None:
        """Cut what took too long in all, though it was never silent: called twice a second."""
        with self._lock:
            end_s = time.monotonic() - self._limits.total_s
            late = [connection for connection, born_s in self._born_s.items() if born_s < end_s]
        for connection in late:
            _cut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 (as the base has them)
        """Peers come and go; the base would print each one's traceback between the log's lines."""
        _log_failure(sys.exception())

    def _forget(self, request: socket.socket) -> None:
        with self._lock:
            self._born_s.pop(request, None)
        self._free.release()


class _Server6(_Server):
    address_family = 10  # AF_INET6


class _Answer(ServerHandler):
    def log_exception(self, exc_info: Any) -> None:
        """One log line; the base would print a traceback between the log's lines."""
        _log_failure(exc_info[1])


class _Handler(WSGIRequestHandler):
    def handle(self) -> None:
        """As the base does it, which leaves no other way to choose who logs."""
        self.raw_requestline = self.rfile.readline(_MAX_LINE_BYTES + 1)
        if len(self.raw_requestline) > _MAX_LINE_BYTES:
            self.requestline = self.request_version = self.command = ""
            self.send_error(HTTPStatus.REQUEST_URI_TOO_LONG)
        elif self.parse_request():
            server = cast("WSGIServer", self.server)
            output = cast("IO[bytes]", self.wfile)
            answer = _Answer(self.rfile, output, self.get_stderr(), self.get_environ(), multithread=True)
            answer.request_handler = self  # type: ignore[attr-defined]
            answer.run(cast("Any", server.get_app()))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base's own name)
        """Say nothing: stderr is for log events."""


def _cut(connection: socket.socket) -> None:
    """Its thread's next read or write ends, and so does the thread."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _log_failure(error: BaseException | None) -> None:
    if not isinstance(error, OSError):
        log.error("metrics.scrape_failed", exc_info=error)


def _negotiating(app: Any) -> Callable[..., Iterable[bytes]]:
    """Have every metric served under its own name, and no header answered by a failure."""

    def served(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        accepted = negotiated(environ.get("HTTP_ACCEPT", ""))
        return app({**environ, "HTTP_ACCEPT": accepted}, start_response)

    return served
