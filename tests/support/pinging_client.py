"""A client process that pings every ten seconds, also between calls; its stderr is gRPC's own debug log.

    python pinging_client.py ADDRESS TOKEN METHOD IDLE_S

METHOD is generate, load or list. One call is made; where IDLE_S is not 0 a second one follows that much
later. After each call its result is printed as a line of JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc

from lorikeet.adapters.v1 import adapter_pb2, adapter_service_pb2_grpc
from lorikeet.inference.v1 import generation_pb2, inference_service_pb2_grpc

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


def load(channel: grpc.Channel, metadata: Any) -> list[str]:
    """Names of the states that a load ends in."""
    stub: Any = adapter_service_pb2_grpc.AdapterServiceStub(channel)
    request = adapter_pb2.LoadAdapterRequest(name="tenants/demo/adapters/w20")
    reply = stub.LoadAdapter(request, metadata=metadata, timeout=250)
    return [adapter_pb2.ResidencyState.Name(placement.state) for placement in reply.placements]


def list_(channel: grpc.Channel, metadata: Any) -> list[str]:
    """Names of all adapters."""
    stub: Any = adapter_service_pb2_grpc.AdapterServiceStub(channel)
    request = adapter_pb2.ListAdaptersRequest(parent="tenants/demo")
    return sorted(a.name for a in stub.ListAdapters(request, metadata=metadata, timeout=250).adapters)


METHODS: dict[str, Callable[[grpc.Channel, Any], object]] = {
    "generate": generate,
    "load": load,
    "list": list_,
}


def main(address: str, token: str, method: str, idle_s: str) -> None:
    """Make the calls."""
    metadata = (("authorization", f"Bearer {token}"),)
    with grpc.insecure_channel(address, OPTIONS) as channel:
        print(json.dumps(METHODS[method](channel, metadata)), flush=True)
        if float(idle_s):
            time.sleep(float(idle_s))
            print(json.dumps(METHODS[method](channel, metadata)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
