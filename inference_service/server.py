"""Builds the service: the only place that connects rooms, opens ports and starts tasks."""

import asyncio
import contextlib
from dataclasses import dataclass

import structlog

from inference_service.api.adapter_intake import AdapterIntake
from inference_service.api.adapter_probe import AdapterProbe
from inference_service.api.authentication import Authenticator
from inference_service.api.catalog import Catalog
from inference_service.api.generation_service import GenerationService
from inference_service.api.inference_servicer import InferenceServicer
from inference_service.api.node_events import NodeEvents
from inference_service.api.prompt_encoder import PromptEncoder
from inference_service.api.residency_service import ResidencyService
from inference_service.api.residency_servicer import ResidencyServicer
from inference_service.engine.engine_client import EngineClient
from inference_service.metrics import NodeMetrics
from inference_service.ports import Engine
from inference_service.settings import Settings
from inference_service.text.chat_template import ChatTemplate
from inference_service.text.grammar_checker import GrammarChecker
from inference_service.text.sampling_defaults import SamplingDefaults
from inference_service.text.tokenizer import Tokenizer
from lorikeet.inference.v1 import inference_service_pb2, inference_service_pb2_grpc
from lorikeet.residency.v1 import residency_service_pb2, residency_service_pb2_grpc
from lorikeet_rpc.ending import end_tasks
from lorikeet_rpc.interceptors import Principal, RequestInterceptor
from lorikeet_rpc.metrics_endpoint import MetricsEndpoint
from lorikeet_rpc.server import RpcServer, check_listen
from lorikeet_rpc.tokens import hash_token, token_id_of
from lorikeet_rpc.wire_count import WireBounds

# From the descriptors: reflection shows a service only if its file is loaded, and stubs load messages alone.
_INFERENCE = inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_RESIDENCY = residency_service_pb2.DESCRIPTOR.services_by_name["ResidencyService"].full_name
_HEALTH_INTERVAL_S = 0.25
# After the grace the engine aborts what still runs; this long its last words may take to the clients.
_ABORT_S = 2.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TextModel:
    """What the front end reads of the model directory."""

    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: SamplingDefaults

    @staticmethod
    def read(settings: Settings) -> "TextModel":
        """Read the files; raises ValueError or OSError, with what to mend."""
        use_defaults = settings.generation_config == "auto"
        return TextModel(
            Tokenizer.from_directory(settings.model_dir),
            ChatTemplate.from_directory(settings.model_dir),
            SamplingDefaults.from_directory(settings.model_dir) if use_defaults else SamplingDefaults(),
        )


class Node:
    """A whole node around a running engine. Build inside the event loop; `start`, then `serve` or `stop`."""

    def __init__(self, settings: Settings, text: TextModel, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self._events = NodeEvents()
        catalog = Catalog(_static_principals(settings))
        self._metrics = NodeMetrics(engine, catalog, show_names=settings.metrics_adapter_names)
        secret = settings.node_token.get_secret_value() if settings.node_token else None
        self._interceptor = RequestInterceptor(
            Authenticator(catalog, secret),
            "inference",
            metrics=self._metrics.requests,
            endless=frozenset({"WatchResidency"}),
            # Tenants' requests only: the manager's catalog pages may well have more parts.
            bounds={f"/{_INFERENCE}/": WireBounds()},
        )
        self.rpc = RpcServer(
            settings.listen,
            tls=settings.tls,
            interceptors=[self._interceptor],
            service_names=(_INFERENCE, _RESIDENCY),
            max_message_bytes=settings.max_message_bytes,
            insecure_listen=settings.insecure_listen,
        )
        self._grammars = GrammarChecker(settings.model_dir, engine.info.vocab_size, engine.info.eos_token_ids)
        self._add_servicers(catalog, text)
        self._tasks: list[asyncio.Task[None]] = []
        self._endpoint: MetricsEndpoint | None = None
        self._is_draining = False

    async def start(self) -> int:
        """Listen and report SERVING; returns the port."""
        if self._settings.metrics_listen:
            self._endpoint = MetricsEndpoint(self._settings.metrics_listen, self._metrics.registry)
        port = await self.rpc.start()
        self._tasks = [
            asyncio.create_task(self._events.follow(self._engine), name="residency-events"),
            asyncio.create_task(self._follow_health(), name="engine-health"),
        ]
        log.info(
            "server.started",
            listen=self._settings.listen,
            port=port,
            metrics_port=self._endpoint.port if self._endpoint else None,
            model=self._engine.info.model_name,
            instance_id=self._engine.instance_id,
        )
        return port

    async def serve(self) -> None:
        """Serve until a signal, then stop in order."""
        grace_s = self._settings.drain_grace_s
        try:
            await self.rpc.serve_until_signal(lambda: self._drain(grace_s), grace_s + _ABORT_S)
        finally:
            await self._end()

    async def stop(self, grace_s: float) -> None:
        """The same order without a signal."""
        try:
            await self.rpc.shut_down(lambda: self._drain(grace_s), grace_s + _ABORT_S)
        finally:
            await self._end()

    async def _drain(self, grace_s: float) -> None:
        self._is_draining = True
        await self._engine.drain(grace_s)
        await self._interceptor.idle()

    async def _end(self) -> None:
        await end_tasks(self._tasks)
        await self._grammars.close()
        if self._endpoint:
            await asyncio.to_thread(self._endpoint.close)

    async def _stop_accepting(self) -> None:
        self._is_draining = True
        await self.rpc.set_serving(serving=False)

    async def _follow_health(self) -> None:
        """NOT_SERVING while the engine is being restarted."""
        was_alive = True
        while True:
            await asyncio.sleep(_HEALTH_INTERVAL_S)
            if self._engine.is_alive != was_alive and not self._is_draining:
                was_alive = self._engine.is_alive
                await self.rpc.set_serving(serving=was_alive)

    def _add_servicers(self, catalog: Catalog, text: TextModel) -> None:
        settings, engine = self._settings, self._engine
        encoder = PromptEncoder(text.tokenizer, text.template, engine.info.limits.max_context_tokens)
        generation = GenerationService(
            engine, encoder, catalog, self._events, self._metrics.requests, self._grammars
        )
        residency = ResidencyService(engine, catalog, self._events, self._stop_accepting)
        intake = AdapterIntake(engine, str(settings.cache_dir), settings.disk_cache_bytes)
        inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(generation, engine, text.defaults), self.rpc.server
        )
        residency_service_pb2_grpc.add_ResidencyServiceServicer_to_server(
            ResidencyServicer(residency, intake, AdapterProbe(engine, text.tokenizer)), self.rpc.server
        )


async def serve(settings: Settings) -> None:
    """Run the service: the engine first, then the port, and back in the opposite order."""
    settings.cache_dir.mkdir(parents=True, exist_ok=True)
    # What can fail at once comes before the engine, which takes long to load.
    check_listen(settings.listen, settings.tls, insecure_listen=settings.insecure_listen)
    text = TextModel.read(settings)
    engine = await EngineClient.start(settings.engine_config())
    try:
        node = Node(settings, text, engine)
        await node.start()
        await node.serve()
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await engine.close()


def _static_principals(settings: Settings) -> dict[str, Principal]:
    hashes = {
        tenant: hash_token(token.get_secret_value()) for tenant, token in settings.static_tenants.items()
    }
    return {sha256: Principal(tenant, token_id=token_id_of(sha256)) for tenant, sha256 in hashes.items()}
