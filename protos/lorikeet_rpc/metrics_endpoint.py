"""The HTTP endpoint that Prometheus and routers scrape."""

import socket
import sys
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
from prometheus_client import CollectorRegistry, disable_created_metrics, make_wsgi_app

from lorikeet_rpc.server import ListenError

_MAX_PORT = 65_535
_KEPT = "escaping=allow-utf-8"

log = structlog.get_logger()


class MetricsEndpoint:
    """Serves a registry at `http://host:port/metrics`, on threads of its own; port 0 picks one.

    A peer that connects and then says or takes nothing for `idle_s` is dropped.

    Raises:
        ValueError: the address is not host:port.
        ListenError: it cannot be listened on.
    """

    def __init__(self, address: str, registry: CollectorRegistry, *, idle_s: float = 10.0) -> None:
        host, port = split_address(address)
        # When a counter was born doubles the number of series and is of use to few.
        disable_created_metrics()
        server_class: type[_Server] = _Server6 if ":" in host else _Server
        app = _keeping_names(make_wsgi_app(registry))
        try:
            self._server = make_server(host, port, app, server_class, _Handler)
        except OSError as error:
            raise ListenError(f"cannot serve metrics on {address!r}: {error.strerror or error}") from error
        self._server.idle_s = idle_s
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
    idle_s = 10.0

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection that may not be idle for ever."""
        connection, peer = super().get_request()
        connection.settimeout(self.idle_s)
        return connection, peer

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 (as the base has them)
        """Peers come and go; the base would print each one's traceback between the log's lines."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("metrics.scrape_failed", exc_info=error)


class _Server6(_Server):
    address_family = 10  # AF_INET6


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base's own name)
        """Say nothing: stderr is for log events."""


_App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def _keeping_names(app: Any) -> _App:
    """Have every metric served under its own name, in every format.

    Where a scraper does not ask for UTF-8 names, prometheus_client writes `vllm_x` for `vllm:x` in
    OpenMetrics, though the colon is as legal there as in the text format. No name here needs any escaping.
    """

    def served(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        accepted = environ.get("HTTP_ACCEPT", "")
        return app({**environ, "HTTP_ACCEPT": kept(accepted)}, start_response)

    return served


def kept(accept: str) -> str:
    """An Accept header that asks for the same formats, with names as they are."""
    return ",".join(_kept_one(one) for one in accept.split(","))


def _kept_one(accepted: str) -> str:
    media_type, *parameters = (part.strip() for part in accepted.split(";"))
    rest = [p for p in parameters if not p.startswith("escaping=")]
    versions = [p.removeprefix("version=") for p in rest if p.startswith("version=")]
    if media_type == "application/openmetrics-text" and not versions:
        rest.append("version=1.0.0")
    elif not versions or media_type not in {"application/openmetrics-text", "text/plain"}:
        return accepted
    return "; ".join((media_type, *rest, _KEPT))
