"""A client process that pings every ten seconds, also between calls; its stderr is gRPC's own debug log.

    python pinging_client.py ADDRESS TOKEN METHOD WAIT_S [DIRECTORY]

METHOD is generate, list or upload. `upload` sends what it has of the directory after a silence of WAIT_S; of
the others one call is made, and where WAIT_S is not 0 a second one that much later. Each result is a line of
JSON on stdout.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from lorikeet.adapters.v1 import adapter_pb2, adapter_service_pb2_grpc
from lorikeet.inference.v1 import generation_pb2, inference_service_pb2_grpc
from tests.support.uploads import upload_parts

OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def generate(channel: grpc.Channel, metadata: Any) -> list[int]:
    """Two greedy tokens of the base model."""
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=[5]),
        sampling=generation_pb2.SamplingParams(temperature=0, max_tokens=2),
    )
    stub: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
    return [t.id for piece in stub.Generate(request, metadata=metadata, timeout=250) for t in piece.tokens]


def list_(channel: grpc.Channel, metadata: Any) -> list[str]:
    """Names of all adapters."""
    stub: Any = adapter_service_pb2_grpc.AdapterServiceStub(channel)
    request = adapter_pb2.ListAdaptersRequest(parent="tenants/demo")
    return sorted(a.name for a in stub.ListAdapters(request, metadata=metadata, timeout=250).adapters)


def upload(channel: grpc.Channel, metadata: Any, directory: Path, silence_s: float) -> int:
    """How many tensors the manager found in a directory that it got after a long silence."""

    def parts() -> Iterator[adapter_pb2.UploadRequest]:
        header, *chunks = upload_parts(directory, "demo/slow", validate_only=True)
        yield header
        time.sleep(silence_s)
        yield from chunks

    stub: Any = adapter_service_pb2_grpc.AdapterServiceStub(channel)
    return stub.Upload(parts(), metadata=metadata, timeout=250).revision.report.tensors_total


def main(address: str, token: str, method: str, wait_s: str, directory: str = "") -> None:
    """Make the calls."""
    metadata = (("authorization", f"Bearer {token}"),)
    with grpc.insecure_channel(address, OPTIONS) as channel:
        if method == "upload":
            print(json.dumps(upload(channel, metadata, Path(directory), float(wait_s))), flush=True)
            return
        call = {"generate": generate, "list": list_}[method]
        print(json.dumps(call(channel, metadata)), flush=True)
        if float(wait_s):
            time.sleep(float(wait_s))
            print(json.dumps(call(channel, metadata)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
