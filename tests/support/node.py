"""A whole node in this process around a fake engine, with a catalog of two tenants, on loopback."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from inference_service.server import Node, TextModel
from inference_service.settings import Settings
from lorikeet.inference.v1 import generation_pb2, inference_service_pb2_grpc
from lorikeet.residency.v1 import residency_pb2, residency_service_pb2_grpc
from lorikeet_rpc.channel import open_channel
from lorikeet_rpc.tokens import hash_token
from tests.support.byte_tokenizer import byte_tokenizer_json
from tests.support.fake_engine import FakeEngine

NODE_TOKEN = "node-secret"
ACME, OTHER, ADMIN = "acme-token", "other-token", "admin-token"
DIGEST, SECOND, OTHERS = "1" * 64, "2" * 64, "3" * 64


def write_model_dir(
    path: Path, chat_template: str = "{% for m in messages %}{{ m.content }}{% endfor %}"
) -> Path:
    """What the front end reads of a model."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(byte_tokenizer_json())
    (path / "chat_template.jinja").write_text(chat_template)
    return path


def catalog_pages(generation: int = 1) -> list[residency_pb2.SyncCatalogRequest]:
    """Tenants acme (with a/prod alias) and other, in two pages."""
    tenants = [
        residency_pb2.CatalogTenant(
            tenant="acme",
            weight=2,
            max_running_requests=3,
            token_sha256=[hash_token(ACME)],
            admin_token_sha256=[hash_token(ADMIN)],
        ),
        residency_pb2.CatalogTenant(tenant="other", token_sha256=[hash_token(OTHER)]),
    ]
    adapters = [
        residency_pb2.CatalogAdapter(
            tenant="acme",
            adapter="pirate",
            current_digest=SECOND,
            aliases={"prod": DIGEST, "lost": OTHERS},
            digests=[DIGEST, SECOND],
        ),
        residency_pb2.CatalogAdapter(tenant="acme", adapter="unready"),
        residency_pb2.CatalogAdapter(
            tenant="other", adapter="secret", current_digest=OTHERS, digests=[OTHERS]
        ),
    ]
    revisions = [
        residency_pb2.CatalogRevision(digest=d, store_path=f"revisions/{d}", payload_bytes=10)
        for d in (DIGEST, SECOND, OTHERS)
    ]
    return [
        residency_pb2.SyncCatalogRequest(
            generation=generation, page=0, tenants=tenants, store_url="file:///store"
        ),
        residency_pb2.SyncCatalogRequest(
            generation=generation, page=1, last_page=True, adapters=adapters, revisions=revisions
        ),
    ]


def auth(token: str | None) -> tuple[tuple[str, str], ...]:
    """Call metadata."""
    return () if token is None else (("authorization", f"Bearer {token}"),)


def make_request(prompt: str = "ab", **sampling: Any) -> generation_pb2.GenerateRequest:
    """A greedy request for five tokens, changed by keyword."""
    top_level = {k: sampling.pop(k) for k in ("adapter", "request_id", "chat", "token_ids") if k in sampling}
    values = {"max_tokens": 5, "temperature": 0.0, **sampling}
    message = generation_pb2.GenerateRequest(
        sampling=generation_pb2.SamplingParams(**{k: v for k, v in values.items() if v is not None}),
        **top_level,
    )
    if message.WhichOneof("input") is None:
        message.prompt = prompt
    return message


@dataclass(frozen=True, slots=True)
class RunningNode:
    """Stubs with default client options, and the engine behind them."""

    node: Node
    engine: FakeEngine
    target: str
    inference: Any  # the stubs know the asynchronous API only in their type files
    residency: Any
    cache_dir: Path

    async def sync(self, pages: Iterable[residency_pb2.SyncCatalogRequest] | None = None) -> int:
        """Push a catalog; returns the generation that the node has then."""
        pages = catalog_pages() if pages is None else pages
        return (await self.residency.SyncCatalog(iter(pages), metadata=auth(NODE_TOKEN))).generation

    async def generate(
        self, request: generation_pb2.GenerateRequest, token: str = ACME, timeout_s: float | None = None
    ) -> list[generation_pb2.GenerateResponse]:
        """All messages of a stream."""
        call = self.inference.Generate(request, metadata=auth(token), timeout=timeout_s)
        return [message async for message in call]


@asynccontextmanager
async def run_node(
    tmp_path: Path, engine: FakeEngine | None = None, *, with_catalog: bool = True, **settings: Any
) -> AsyncIterator[RunningNode]:
    """Start a node; stops it at the end."""
    engine = engine or FakeEngine()
    values = {
        "model_dir": write_model_dir(tmp_path / "model"),
        "data_dir": tmp_path / "data",
        "listen": "127.0.0.1:0",
        "node_token": NODE_TOKEN,
        **settings,
    }
    parsed = Settings.model_validate(values)
    node = Node(parsed, TextModel.read(parsed), engine)
    target = f"127.0.0.1:{await node.start()}"
    channel = open_channel(target, aio=True)
    running = RunningNode(
        node,
        engine,
        target,
        inference_service_pb2_grpc.InferenceServiceStub(channel),
        residency_service_pb2_grpc.ResidencyServiceStub(channel),
        parsed.cache_dir,
    )
    try:
        if with_catalog:
            await running.sync()
        yield running
    finally:
        await channel.close()
        await node.stop(0.2)


def text_of(messages: list[generation_pb2.GenerateResponse]) -> str:
    """The whole text."""
    return "".join(m.text_delta for m in messages)


async def finished(call: Any) -> list[Any]:
    """What is left of a stream, read to its end, or a unary call's reply."""
    if not hasattr(call, "read"):
        return [await call]
    messages: list[Any] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def code_of(call: Any) -> grpc.StatusCode:
    """The status that a unary call or a stream ends with."""
    try:
        await finished(call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
