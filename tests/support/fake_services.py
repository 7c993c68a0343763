"""All three public services in this process, over real gRPC on loopback, with scripted faults.

For tests of clients: they see real channels, statuses and flow control, and the test sees every request.
"""

import hashlib
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from lorikeet.adapters.v1 import adapter_pb2, adapter_service_pb2_grpc, tenant_pb2, tenant_service_pb2_grpc
from lorikeet.inference.v1 import generation_pb2, inference_service_pb2_grpc, model_pb2
from lorikeet_contract.schema import LoraSchema, LoraSite, SiteKind, SiteSlice
from lorikeet_contract.status import ServiceError, StatusCode
from lorikeet_rpc.errors import to_status
from lorikeet_rpc.schema_message import schema_to_message

TOKEN = "lk_test"
SCHEMA = LoraSchema(1, (LoraSite("q", 0, SiteKind.LINEAR, 8, 8, (SiteSlice("", 8, ("q_proj",)),)),))


def service_error(
    code: StatusCode, message: str = "said the fake", *, reason: str = "", retry_after_s: float | None = None
) -> ServiceError:
    """An error of any code; the reason defaults to the code's name."""
    kind = type("FakeError", (ServiceError,), {"code": code, "reason": reason or code.value})
    return kind(message, metadata={"from": "fake"}, retry_after_s=retry_after_s)


class Faults:
    """Errors to raise, per method, in order, before the method works again; and who called what."""

    def __init__(self) -> None:
        self.pending: dict[str, list[ServiceError]] = {}
        self.calls: list[str] = []

    def add(self, method: str, *errors: ServiceError) -> None:
        """The next calls of `method` fail with these."""
        self.pending.setdefault(method, []).extend(errors)

    def enter(self, method: str, context: Any) -> None:
        """Count a call; check its token; fail it if a fault is pending."""
        self.calls.append(method)
        if dict(context.invocation_metadata()).get("authorization") != f"Bearer {TOKEN}":
            context.abort_with_status(to_status(service_error(StatusCode.UNAUTHENTICATED, "unknown token")))
        if pending := self.pending.get(method):
            context.abort_with_status(to_status(pending.pop(0)))


class FakeInference(inference_service_pb2_grpc.InferenceServiceServicer):
    """Answers with scripted pieces; by default the prompt's words, one a token."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.script: Callable[[generation_pb2.GenerateRequest, Any], Iterator[Any]] = echo_words
        self.model = model_pb2.GetModelResponse(
            name="fake", architecture="fake_moe", vocab_size=64, lora_schema=schema_to_message(SCHEMA)
        )
        self.aborted: list[str] = []
        self.ended = threading.Event()

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:
        self.faults.enter("Generate", context)
        self.requests.append(request)
        context.add_callback(self.ended.set)
        yield from self.script(request, context)

    def Complete(self, request: Any, context: Any) -> Any:
        self.faults.enter("Complete", context)
        self.requests.append(request.request)
        pieces = list(self.script(request.request, context))
        samples = [_whole(pieces, index) for index in sorted({piece.index for piece in pieces})]
        return generation_pb2.CompleteResponse(
            request_id=pieces[0].request_id,
            text=samples[0].text,
            tokens=samples[0].tokens,
            finish=samples[0].finish,
            further_samples=samples[1:],
        )

    def Abort(self, request: Any, context: Any) -> Any:
        self.faults.enter("Abort", context)
        self.aborted.append(request.request_id)
        return generation_pb2.AbortResponse(aborted=request.request_id == "running")

    def Tokenize(self, request: Any, context: Any) -> Any:
        self.faults.enter("Tokenize", context)
        words = (request.prompt or request.chat.messages[0].content).split()
        return generation_pb2.TokenizeResponse(
            ids=range(len(words)), token_bytes=[word.encode() for word in words], rendered="<rendered>"
        )

    def GetModel(self, request: Any, context: Any) -> Any:
        self.faults.enter("GetModel", context)
        return self.model


def _whole(pieces: list[Any], index: int) -> generation_pb2.Sample:
    """One sample of a script's pieces."""
    own = [piece for piece in pieces if piece.index == index]
    return generation_pb2.Sample(
        index=index,
        text="".join(piece.text_delta for piece in own),
        tokens=[token for piece in own for token in piece.tokens],
        finish=own[-1].finish,
    )


def echo_words(request: Any, context: Any) -> Iterator[Any]:
    """One piece a word of the prompt, then the finish."""
    words = request.prompt.split(" ")
    request_id = request.request_id or "made-by-server"
    for sequence, word in enumerate(words):
        token = generation_pb2.TokenInfo(id=sequence, text_bytes=word.encode(), logprob=-0.5)
        token.top_logprobs.add(id=sequence, logprob=-0.5)
        yield generation_pb2.GenerateResponse(
            request_id=request_id, sequence=sequence, text_delta=word, tokens=[token]
        )
    finish = generation_pb2.Finish(
        reason=generation_pb2.FINISH_REASON_LENGTH,
        usage=generation_pb2.Usage(prompt_tokens=3, cached_tokens=1, output_tokens=len(words)),
        timings=generation_pb2.Timings(queue_ms=1, adapter_wait_ms=2, prefill_ms=3, decode_ms=4),
    )
    if request.HasField("adapter"):
        finish.adapter.digest = "d" * 64
        finish.adapter.revision = f"tenants/demo/adapters/{request.adapter}/revisions/{'d' * 64}"
        finish.adapter.tier_hit = generation_pb2.ADAPTER_TIER_HOST
    yield generation_pb2.GenerateResponse(request_id=request_id, sequence=len(words), finish=finish)


class FakeAdapters(adapter_service_pb2_grpc.AdapterServiceServicer):
    """Keeps uploads in memory; can break one after so many bytes."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.headers: list[adapter_pb2.UploadHeader] = []
        self.received: dict[str, dict[str, bytearray]] = {}
        self.chunk_sizes: list[int] = []
        self.break_after_bytes: int | None = None
        self.on_upload: Callable[[Any, Any], Any] | None = None
        self.adapters = [make_adapter(f"a{n}") for n in range(5)]
        self.requests: list[Any] = []
        self.verdict = adapter_pb2.PROBE_VERDICT_CHANGES

    def Upload(self, request_iterator: Any, context: Any) -> Any:
        self.faults.enter("Upload", context)
        if self.on_upload is not None:
            return self.on_upload(request_iterator, context)
        header = next(request_iterator).header
        self.headers.append(header)
        files = self.received.setdefault(header.request_id, {file.name: bytearray() for file in header.files})
        for request in request_iterator:
            data = files[request.chunk.file_name]
            assert request.chunk.offset == len(data)
            data += request.chunk.data
            self.chunk_sizes.append(len(request.chunk.data))
            if self.break_after_bytes is not None and sum(map(len, files.values())) >= self.break_after_bytes:
                self.break_after_bytes = None
                context.abort_with_status(to_status(service_error(StatusCode.UNAVAILABLE, "broke")))
        for file in header.files:
            if hashlib.sha256(files[file.name]).hexdigest() != file.sha256:
                context.abort_with_status(
                    to_status(service_error(StatusCode.INVALID_ARGUMENT, f"sha256 of {file.name}"))
                )
        return adapter_pb2.UploadResponse(revision=make_adapter("up").revisions[0], created=True)

    def GetUpload(self, request: Any, context: Any) -> Any:
        self.faults.enter("GetUpload", context)
        if request.request_id not in self.received:
            context.abort_with_status(to_status(service_error(StatusCode.NOT_FOUND, "no such upload")))
        files = self.received[request.request_id]
        return adapter_pb2.GetUploadResponse(received_bytes={name: len(data) for name, data in files.items()})

    def GetAdapter(self, request: Any, context: Any) -> Any:
        self.faults.enter("GetAdapter", context)
        for adapter in self.adapters:
            if adapter.name.endswith("/" + request.name.rpartition("/")[2]):
                return adapter_pb2.GetAdapterResponse(adapter=adapter)
        return context.abort_with_status(
            to_status(service_error(StatusCode.NOT_FOUND, f"adapter {request.name!r} is not registered"))
        )

    def ListAdapters(self, request: Any, context: Any) -> Any:
        self.faults.enter("ListAdapters", context)
        self.requests.append(request)
        start = int(request.page_token or 0)
        end = start + request.page_size
        return adapter_pb2.ListAdaptersResponse(
            adapters=self.adapters[start:end], next_page_token=str(end) if end < len(self.adapters) else ""
        )

    def DeleteAdapter(self, request: Any, context: Any) -> Any:
        self.faults.enter("DeleteAdapter", context)
        self.requests.append(request)
        return adapter_pb2.DeleteAdapterResponse()

    def PinAdapter(self, request: Any, context: Any) -> Any:
        self.faults.enter("PinAdapter", context)
        adapter = make_adapter("a0")
        adapter.pinned = request.pinned
        return adapter_pb2.PinAdapterResponse(adapter=adapter)

    def SetAlias(self, request: Any, context: Any) -> Any:
        self.faults.enter("SetAlias", context)
        adapter = make_adapter("a0")
        adapter.aliases.clear()
        if request.digest:
            adapter.aliases[request.alias] = request.digest
        return adapter_pb2.SetAliasResponse(adapter=adapter)

    def LoadAdapter(self, request: Any, context: Any) -> Any:
        self.faults.enter("LoadAdapter", context)
        failure = "no room" if request.name.endswith("toobig") else ""
        state = adapter_pb2.RESIDENCY_STATE_ABSENT if failure else request.tier
        return adapter_pb2.LoadAdapterResponse(placements=[make_placement(state, failure=failure)])

    def UnloadAdapter(self, request: Any, context: Any) -> Any:
        self.faults.enter("UnloadAdapter", context)
        return adapter_pb2.UnloadAdapterResponse(
            placements=[make_placement(adapter_pb2.RESIDENCY_STATE_DISK)]
        )

    def ProbeAdapter(self, request: Any, context: Any) -> Any:
        self.faults.enter("ProbeAdapter", context)
        self.requests.append(request)
        revision = make_adapter(request.name.rpartition("/")[2]).revisions[0]
        revision.ClearField("report")
        revision.probe.MergeFrom(
            adapter_pb2.Probe(
                verdict=self.verdict, max_difference=1.25, noise=0.0, top1_changes=7, positions=64, node="n:1"
            )
        )
        revision.probe.time.FromSeconds(1_700_000_000)
        return adapter_pb2.ProbeAdapterResponse(revision=revision)

    def GetPlacement(self, request: Any, context: Any) -> Any:
        self.faults.enter("GetPlacement", context)
        return adapter_pb2.GetPlacementResponse(
            placements=[make_placement(adapter_pb2.RESIDENCY_STATE_ACTIVE)]
        )


class FakeTenants(tenant_service_pb2_grpc.TenantServiceServicer):
    """Tenants in a list."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.tenants: list[tenant_pb2.Tenant] = []
        self.request_ids: list[str] = []

    def CreateTenant(self, request: Any, context: Any) -> Any:
        self.request_ids.append(request.request_id)
        self.faults.enter("CreateTenant", context)
        tenant = tenant_pb2.Tenant(name=f"tenants/{request.tenant_id}", limits=request.limits, etag="1")
        self.tenants.append(tenant)
        return tenant_pb2.CreateTenantResponse(tenant=tenant)

    def GetTenant(self, request: Any, context: Any) -> Any:
        self.faults.enter("GetTenant", context)
        return tenant_pb2.GetTenantResponse(tenant=tenant_pb2.Tenant(name=request.name))

    def ListTenants(self, request: Any, context: Any) -> Any:
        self.faults.enter("ListTenants", context)
        start = int(request.page_token or 0)
        end = start + request.page_size
        return tenant_pb2.ListTenantsResponse(
            tenants=self.tenants[start:end], next_page_token=str(end) if end < len(self.tenants) else ""
        )

    def DeleteTenant(self, request: Any, context: Any) -> Any:
        self.faults.enter("DeleteTenant", context)
        return tenant_pb2.DeleteTenantResponse()

    def CreateToken(self, request: Any, context: Any) -> Any:
        self.faults.enter("CreateToken", context)
        record = tenant_pb2.TokenRecord(token_id="abc", admin=request.admin)
        return tenant_pb2.CreateTokenResponse(token="lk_new", record=record)

    def RevokeToken(self, request: Any, context: Any) -> Any:
        self.faults.enter("RevokeToken", context)
        return tenant_pb2.RevokeTokenResponse()


def make_adapter(name: str) -> adapter_pb2.Adapter:
    """An adapter of tenant demo with one revision and a report over two layers."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    resource = f"tenants/demo/adapters/{name}"
    report = adapter_pb2.UploadReport(tensors_total=5, tensors_used=4, tensors_neutral=1, warnings=["odd"])
    for layer in (0, 1):
        report.sites.add(
            site=f"layers.{layer}.q", layer=layer, rank=4, scales=[2.0], layout="linear", tensors=2, bytes=64
        )
    report.coverage.add(
        site="q",
        layers="0-1",
        layers_without="2",
        tensors=4,
        ranks=[4],
        scales=[2.0],
        layouts=["linear"],
        bytes=128,
    )
    report.coverage.add(site="router", layers_without="0-2", num_experts=0)
    for side, shape in (("A", (4, 8)), ("B", (8, 4))):
        report.tensors.add(
            key=f"layers.*.q_proj.lora_{side}.weight",
            indices=["0-1"],
            count=2,
            role=f"TENSOR_ROLE_LORA_{side}",
            shape=shape,
            dtype="BF16",
            bytes=128,
            site="q",
            layout="linear",
            rank=4,
            scale=2.0,
            scaling="8/4",
        )
    report.tensors.add(
        key="lm_head.base_layer.weight",
        count=1,
        role=adapter_pb2.TENSOR_ROLE_BASE_WEIGHT,
        shape=(64, 8),
        dtype="BF16",
        bytes=1024,
        neutral="equal to the base model's own weight of lm_head",
    )
    report.file_bytes = 1280
    revision = adapter_pb2.Revision(
        name=f"{resource}/revisions/{digest}",
        digest=digest,
        state=adapter_pb2.REVISION_STATE_READY,
        payload_bytes=2048,
        dtype="bfloat16",
        max_rank=4,
        report=report,
    )
    revision.create_time.FromSeconds(1_700_000_000)
    return adapter_pb2.Adapter(
        name=resource, current_digest=digest, aliases={"prod": digest}, revisions=[revision], etag="7"
    )


def make_placement(state: Any, *, failure: str = "") -> adapter_pb2.Placement:
    """A placement on the one node."""
    return adapter_pb2.Placement(
        node="127.0.0.1:1",
        instance_id="i",
        revision=make_adapter("a0").revisions[0].name,
        state=state,
        desired=state,
        bytes=2048,
        failure=failure,
    )


class FakeServices:
    """The services of one fake server and its address."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.inference = FakeInference(self.faults)
        self.adapters = FakeAdapters(self.faults)
        self.tenants = FakeTenants(self.faults)
        self.address = ""


@contextmanager
def fake_services() -> Generator[FakeServices]:
    """Serve until the block ends."""
    fakes = FakeServices()
    server = grpc.server(ThreadPoolExecutor(8))
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(fakes.inference, server)
    adapter_service_pb2_grpc.add_AdapterServiceServicer_to_server(fakes.adapters, server)
    tenant_service_pb2_grpc.add_TenantServiceServicer_to_server(fakes.tenants, server)
    fakes.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield fakes
    finally:
        server.stop(None).wait()
