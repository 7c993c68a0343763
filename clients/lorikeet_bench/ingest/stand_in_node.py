"""A node that serves no model: it tells a manager a LoRA schema and agrees to all else.

A manager checks uploads against the schema of a node. The weights of gpt-oss-20b are not needed for that.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc

from lorikeet.inference.v1 import inference_service_pb2_grpc, model_pb2
from lorikeet.residency.v1 import residency_pb2 as pb
from lorikeet.residency.v1 import residency_service_pb2_grpc
from lorikeet_contract.schema import LoraSchema
from lorikeet_rpc.schema_message import schema_to_message

_INSTANCE = "stand-in"
# A watch holds a thread for as long as the manager follows it.
_THREADS = 8


class StandInNode:
    """Serves on a free loopback port while it is entered.

    `is_followed` is set once a manager has taken the schema and sent its catalog.
    """

    def __init__(self, schema: LoraSchema, *, max_rank: int, dtype: str = "bfloat16") -> None:
        self.model = model_pb2.GetModelResponse(
            name="stand-in",
            architecture="GptOssForCausalLM",
            instance_id=_INSTANCE,
            base_digest=schema.digest,
            dtype=dtype,
            limits=model_pb2.Limits(
                max_rank=max_rank,
                max_active_adapters=8,
                adapter_arena_bytes=8 << 30,
                host_pool_bytes=8 << 30,
            ),
            lora_schema=schema_to_message(schema),
        )
        self.is_followed = threading.Event()
        self.watches: list[threading.Event] = []
        self.address = ""
        self._server = grpc.server(ThreadPoolExecutor(_THREADS))
        # The methods that are left out answer UNIMPLEMENTED.
        residency_service_pb2_grpc.add_ResidencyServiceServicer_to_server(
            _Residency(self),  # pyright: ignore[reportAbstractUsage]
            self._server,
        )
        inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(
            _Inference(self),  # pyright: ignore[reportAbstractUsage]
            self._server,
        )

    def __enter__(self) -> Self:
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for ended in self.watches:
            ended.set()
        self._server.stop(1).wait()


class _Residency(residency_service_pb2_grpc.ResidencyServiceServicer):
    def __init__(self, node: StandInNode) -> None:
        self._node = node

    def SyncCatalog(self, request_iterator: Any, context: Any) -> pb.SyncCatalogResponse:
        pages = list(request_iterator)
        self._node.is_followed.set()
        return pb.SyncCatalogResponse(instance_id=_INSTANCE, generation=pages[0].generation)

    def ListResident(self, request: Any, context: Any) -> pb.ListResidentResponse:
        return pb.ListResidentResponse(instance_id=_INSTANCE)

    def WatchResidency(self, request: Any, context: Any) -> Iterator[pb.WatchResidencyResponse]:
        yield pb.WatchResidencyResponse(instance_id=_INSTANCE, snapshot=self.ListResident(None, None))
        ended = threading.Event()
        context.add_callback(ended.set)
        self._node.watches.append(ended)
        ended.wait()

    def UnloadAdapter(self, request: Any, context: Any) -> pb.UnloadAdapterResponse:
        return pb.UnloadAdapterResponse(unloaded=False)


class _Inference(inference_service_pb2_grpc.InferenceServiceServicer):
    def __init__(self, node: StandInNode) -> None:
        self._node = node

    def GetModel(self, request: Any, context: Any) -> model_pb2.GetModelResponse:
        return self._node.model
