"""TLS and mutual TLS with certificates made on the spot."""

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorikeet_rpc.channel import ClientTls, open_channel
from lorikeet_rpc.server import RpcServer, TlsFiles
from tests.support.certificates import write_certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, and a certificate of it for localhost that client and server share."""
    return write_certificates(tmp_path_factory.mktemp("tls"))


async def _check(target: str, tls: ClientTls | None) -> int:
    async with open_channel(target, token="t", tls=tls, aio=True) as channel:
        reply: Any = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=5
        )
        return reply.status


@pytest.mark.parametrize("is_mutual", [False, True])
async def test_tls(certificates: Path, is_mutual: bool) -> None:
    """Clients that trust the CA get in; plain text and, with mutual TLS, strangers do not."""
    cert, key, ca = (certificates / name for name in ("cert.pem", "key.pem", "ca.pem"))
    files = TlsFiles(cert, key, ca if is_mutual else None)
    server = RpcServer("0.0.0.0:0", tls=files, interceptors=[], service_names=[])
    target = f"localhost:{await server.start()}"
    try:
        good = ClientTls(ca, cert, key) if is_mutual else ClientTls(ca)
        assert await _check(target, good) == health_pb2.HealthCheckResponse.SERVING
        for bad in (None, ClientTls(ca) if is_mutual else ClientTls()):
            with pytest.raises(grpc.aio.AioRpcError):
                await _check(target, bad)
    finally:
        await server.server.stop(None)
