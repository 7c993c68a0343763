"""`python -m lorikeet_rpc.health_check HOST:PORT`: exit code 0 if grpc.health.v1 says SERVING there, else 1.

For a container's health check: it imports little, so that a run every few seconds costs little.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorikeet_rpc.channel import ClientTls, open_channel

# A container engine that cuts the check off sooner never sees its reason.
DEFAULT_TIMEOUT_S = 3.0


def serving_problem(address: str, service: str, tls: ClientTls | None, timeout_s: float) -> str:
    """Why `address` does not serve; empty where it does."""
    with open_channel(address, tls=tls, aio=False) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its types name no methods
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            failure: Any = error
            return f"{address}: {failure.code().name}: {failure.details()}"
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask once; 0 for SERVING, 1 for anything else with the reason on stderr, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="lorikeet_rpc.health_check", description="Ask grpc.health.v1 once.")
    parser.add_argument("address", help="host:port or unix:/path")
    parser.add_argument("--service", default="", help="a service's full name; without it the whole server")
    parser.add_argument(
        "--timeout-s", type=float, default=DEFAULT_TIMEOUT_S, help="how long to wait for the answer"
    )
    parser.add_argument("--tls-ca", type=Path, help="speak TLS, trusting this authority")
    parser.add_argument("--tls-cert", type=Path, help="certificate to show, for mutual TLS")
    parser.add_argument("--tls-key", type=Path, help="its key")
    options = parser.parse_args(arguments)
    tls = ClientTls(options.tls_ca, options.tls_cert, options.tls_key) if options.tls_ca else None
    try:
        problem = serving_problem(options.address, options.service, tls, options.timeout_s)
    except OSError as error:  # a TLS file that cannot be read
        problem = str(error)
    if problem:
        sys.stderr.write(f"{problem}\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
