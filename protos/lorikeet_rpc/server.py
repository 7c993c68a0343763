"""A gRPC server as both services run it: health, reflection, TLS, channel options, ordered shutdown."""

import asyncio
import ipaddress
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from lorikeet_rpc.ending import end_tasks, force_exit_after
from lorikeet_rpc.health import HealthServicer

# What one request message may weigh. Far above gRPC's default of 4 MiB, because a prompt of two million token
# ids (up to 10 bytes each on the wire, unpacked) has to arrive to be refused for its length, by name.
DEFAULT_MAX_MESSAGE_BYTES = 32 * 1024 * 1024

_NEVER_S = 10 * 365 * 86400.0
_LAST_REPLIES_S = 0.2
_EXIT_S = 10.0  # after the grace: the embedded store's last sync, the engine's end
_MAX_PENDING_CALLS = 20_000

log = structlog.get_logger()


class ListenError(Exception):
    """The address cannot be, or must not be, listened on; the message says what to do."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a server. With `client_ca_file` clients must show a certificate (mutual TLS)."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None

    @classmethod
    def from_settings(cls, cert: Path | None, key: Path | None, client_ca: Path | None) -> Self | None:
        """What --tls-cert, --tls-key and --tls-client-ca say; None for plain text.

        Raises:
            ValueError: one is given without what it needs.
        """
        if (cert is None) != (key is None):
            raise ValueError("--tls-cert and --tls-key go together: give both or neither")
        if cert is None or key is None:
            if client_ca is not None:
                raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
            return None
        return cls(cert, key, client_ca)

    def credentials(self) -> grpc.ServerCredentials:
        """Read the files."""
        client_ca = self.client_ca_file.read_bytes() if self.client_ca_file else None
        return grpc.ssl_server_credentials(
            [(self.key_file.read_bytes(), self.cert_file.read_bytes())],
            root_certificates=client_ca,
            require_client_auth=client_ca is not None,
        )


class RpcServer:
    """Build inside the running event loop, add servicers to `server`, `start`, then `serve_until_signal`.

    Args:
        address: host:port (port 0 picks one) or unix:/path.
        tls: None for plain text, which only loopback and unix sockets may use.
        interceptors: usually one RequestInterceptor.
        service_names: full names, each with its own health; shown by reflection.
        max_message_bytes: largest request message (replies stay below clients' default of 4 MiB).
        insecure_listen: allow plain text beyond loopback, e.g. inside a compose network.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: TlsFiles | None,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        service_names: Sequence[str],
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        insecure_listen: bool = False,
    ) -> None:
        check_listen(address, tls, insecure_listen=insecure_listen)
        self.server = grpc.aio.server(interceptors=interceptors, options=_options(max_message_bytes))
        self.health = HealthServicer(service_names)
        self._address = address
        self._tls = tls
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        reflection.enable_server_reflection(
            (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server
        )

    async def start(self) -> int:
        """Listen and report SERVING. Call when everything behind the servicers is ready. Returns the port."""
        try:
            port = (
                self.server.add_secure_port(self._address, self._tls.credentials())
                if self._tls
                else self.server.add_insecure_port(self._address)
            )
        except RuntimeError as error:
            raise ListenError(f"cannot listen on {self._address!r}: {error}") from error
        if not port and not self._address.startswith("unix"):
            raise ListenError(f"cannot listen on {self._address!r}: is the port taken?")
        await self.set_serving(serving=True)
        await self.server.start()
        return port

    async def set_serving(self, *, serving: bool) -> None:
        """Set the health of the whole server and of each service."""
        await self.health.set_all(serving=serving)

    async def serve_until_signal(self, drain: Callable[[], Awaitable[object]], grace_s: float) -> None:
        """Serve until SIGTERM or SIGINT, then `shut_down`. A second signal cuts the grace short.

        From the signal on the process has `grace_s` and a little more to end; then it is ended by force.
        """
        loop = asyncio.get_running_loop()
        signals: asyncio.Queue[int] = asyncio.Queue()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signals.put_nowait, number)
        try:
            await signals.get()
            force_exit_after(grace_s + _EXIT_S)
            await self.shut_down(drain, grace_s, hurry=signals.get)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def shut_down(
        self,
        drain: Callable[[], Awaitable[object]],
        grace_s: float,
        hurry: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Health NOT_SERVING, no new calls, `drain` for at most `grace_s`, then end what is left.

        `drain` returns when nothing is worth waiting for any more; calls still open then (watches, health
        watches) are cancelled at once, so that they never cost the whole grace.
        """
        log.info("server.draining", grace_s=grace_s)
        await self.health.enter_graceful_shutdown()
        # This stop only closes the door. Its own timer must never fire: grpc.aio 1.85 crashes the process
        # when one stop's grace ends while another has just destroyed the server (seen, 2 of 50 runs).
        stopping = asyncio.ensure_future(self.server.stop(_NEVER_S))
        draining = asyncio.ensure_future(drain())
        hurrying = [asyncio.ensure_future(hurry())] if hurry else []
        try:
            await asyncio.wait(
                (draining, stopping, *hurrying), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED
            )
            if draining.done():
                # Replies of calls that just ended are still on their way out.
                await asyncio.wait((stopping, *hurrying), timeout=_LAST_REPLIES_S)
        finally:
            await self.server.stop(None)
            await stopping
            await end_tasks((draining, *hurrying))
        if not draining.cancelled() and (error := draining.exception()):
            raise error  # the drain's own, shown only now that everything is closed
        log.info("server.stopped")


def check_listen(address: str, tls: TlsFiles | None, *, insecure_listen: bool) -> None:
    """Raise ListenError where tokens would travel in clear text beyond this machine."""
    if tls is None and not insecure_listen and not is_loopback(address):
        raise ListenError(
            f"{address!r} is reachable from other machines and tokens would travel in clear text: give "
            "--tls-cert and --tls-key, or --insecure-listen if the network itself is trusted"
        )


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach `address`. Names other than localhost count as reachable."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        # The services keep replies below 4 MiB; a client that raised its own limit may get more.
        ("grpc.max_send_message_length", -1),
        # Beyond 1000 calls that Python has not taken up gRPC drops some at random, as CANCELLED. The services
        # have limits of their own, which say so and when to try again.
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _MAX_PENDING_CALLS),
        # Two servers on one port would share its calls at random: refuse the second.
        ("grpc.so_reuseport", 0),
        # Clients ping every 10 s or more, also between calls and during a long prefill. The default allows a
        # ping without data every 5 minutes and answers the third with GOAWAY too_many_pings. Half of 10 s,
        # because pings bunch up when a network stalls.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A client whose machine vanished sends no FIN: without our pings its stream would run to max_tokens.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),  # see lorikeet_rpc.channel: without it a minute
        ("grpc.http2.max_pings_without_data", 0),
    ]
