"""Channels to our servers, with the options that long streams need and the bearer token on each call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, overload

import grpc
import grpc.aio

# Message limits stay at gRPC's defaults (4 MiB): servers must work with clients that know no options.
_OPTIONS: Sequence[tuple[str, int]] = (
    # Between calls too, so that the next call does not start on a dead connection.
    ("grpc.keepalive_permit_without_calls", 1),
    # The default stops pinging after two pings without data: a request waiting for its adapter sends none.
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC waits up to two minutes between connection attempts; a local server restarts in seconds.
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """TLS of a client. `ca_file` None trusts the system's authorities; cert and key are for mutual TLS."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files."""
        return grpc.ssl_channel_credentials(
            root_certificates=self.ca_file.read_bytes() if self.ca_file else None,
            private_key=self.key_file.read_bytes() if self.key_file else None,
            certificate_chain=self.cert_file.read_bytes() if self.cert_file else None,
        )


@dataclass(frozen=True, slots=True)
class Ping:
    """How often an open connection is tried, and how long an answer may take.

    A dead peer or a NAT that forgot us shows within the sum, even while a long prefill sends nothing. Servers
    refuse pings that come more often than every 5 s.
    """

    every_s: float = 30.0
    timeout_s: float = 10.0


DEFAULT_PING = Ping()


@overload
def open_channel(
    target: str,
    *,
    token: str | None = None,
    tls: ClientTls | None = None,
    ping: Ping = ...,
    aio: Literal[True],
) -> grpc.aio.Channel: ...
@overload
def open_channel(
    target: str,
    *,
    token: str | None = None,
    tls: ClientTls | None = None,
    ping: Ping = ...,
    aio: Literal[False],
) -> grpc.Channel: ...
def open_channel(
    target: str,
    *,
    token: str | None = None,
    tls: ClientTls | None = None,
    ping: Ping = DEFAULT_PING,
    aio: bool,
) -> grpc.aio.Channel | grpc.Channel:
    """Open a channel; connects on the first call. The caller closes it.

    Args:
        target: host:port, or any gRPC target.
        token: sent as `authorization: Bearer` on each call. Without `tls` it travels in clear text, so use
            that on loopback or a trusted network only.
        tls: None for plain text.
        ping: how soon a dead connection shows.
        aio: a grpc.aio channel (call inside the running loop) or a blocking one.
    """
    options = (
        *_OPTIONS,
        ("grpc.keepalive_time_ms", round(ping.every_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(ping.timeout_s * 1000)),
        # Measured with grpcio 1.85: this one decides, and its default of a minute hides the one before it.
        ("grpc.http2.ping_timeout_ms", round(ping.timeout_s * 1000)),
    )
    if aio:
        channel = (
            grpc.aio.secure_channel(target, tls.credentials(), options=options)
            if tls
            else grpc.aio.insecure_channel(target, options=options)
        )
        return _TokenChannel(channel, _bearer(token)) if token else channel
    blocking = (
        grpc.secure_channel(target, tls.credentials(), options=options)
        if tls
        else grpc.insecure_channel(target, options=options)
    )
    return grpc.intercept_channel(blocking, _TokenInterceptor(_bearer(token))) if token else blocking


def _bearer(token: str) -> tuple[str, str]:
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            "the token has characters that a header cannot carry; copy it again without white space"
        )
    return ("authorization", f"Bearer {token}")


class _TokenChannel(grpc.aio.Channel):
    """Adds one header to each call.

    Not aio client interceptors: those wrap every stream in a task of its own, which delays cancellation.
    """

    def __init__(self, channel: grpc.aio.Channel, header: tuple[str, str]) -> None:
        self._channel = channel
        self._header = header

    def _with_header(self, call: Callable[..., Any]) -> Any:
        def invoke(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            return call(*args, metadata=(*(metadata or ()), self._header), **kwargs)

        return invoke

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_header(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_header(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_header(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_header(self._channel.stream_stream(*args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> Self:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self._channel.close()


class _TokenInterceptor(
    grpc.UnaryUnaryClientInterceptor,  # pyright: ignore[reportMissingTypeArgument] (generic in the stubs only)
    grpc.UnaryStreamClientInterceptor,  # pyright: ignore[reportMissingTypeArgument] (generic in the stubs only)
    grpc.StreamUnaryClientInterceptor,  # pyright: ignore[reportMissingTypeArgument] (generic in the stubs only)
    grpc.StreamStreamClientInterceptor,  # pyright: ignore[reportMissingTypeArgument] (generic in the stubs only)
):
    def __init__(self, header: tuple[str, str]) -> None:
        self._header = header

    def _call(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(_WithHeader(details, self._header), request)

    intercept_unary_unary = _call  # pyright: ignore[reportAssignmentType]
    intercept_unary_stream = _call  # pyright: ignore[reportAssignmentType]
    intercept_stream_unary = _call  # pyright: ignore[reportAssignmentType]
    intercept_stream_stream = _call  # pyright: ignore[reportAssignmentType]


class _WithHeader(grpc.ClientCallDetails):
    """A call's details with one header more."""

    def __init__(self, details: Any, header: tuple[str, str]) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = (*(details.metadata or ()), header)
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = details.compression
