"""A request's way from its parsed form through the engine and back to text. Knows neither grpc nor protobuf.

Nothing is buffered here: one output of the engine is taken for each piece that was sent, so a slow client
holds back only its own stream (the engine's client merges, and beyond a bound refuses, what piles up).
"""

import asyncio
import dataclasses
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from inference_service.api.catalog import Catalog
from inference_service.api.convert_constraint import shown
from inference_service.api.field_errors import refuse
from inference_service.api.generation_piece import (
    MAX_REPLY_BYTES,
    GenerationFinish,
    GenerationPiece,
    ServedAdapter,
)
from inference_service.api.generation_request import (
    ChatPrompt,
    GenerationRequest,
    TextPrompt,
    TokenPrompt,
    prompt_field,
)
from inference_service.api.node_events import NodeEvents
from inference_service.api.prompt_encoder import PromptEncoder
from inference_service.api.reply_assembly import ReplyAssembly
from inference_service.api.reply_limits import (
    check_complete_fits,
    check_prompt_logprobs,
    reply_too_large,
)
from inference_service.api.running_requests import RunningRequests
from inference_service.api.token_clock import TokenClock
from inference_service.domain.errors import DeadlineError, GrammarsMissingError
from inference_service.domain.request import EngineRequest, FinishReason
from inference_service.domain.sampling import SamplingParams
from inference_service.domain.structured_output import (
    GrammarRefusedError,
    GrammarsUnavailableError,
    StructuredOutput,
)
from inference_service.ports import Engine, TokenObserver
from inference_service.text.grammar_checker import GrammarChecker
from lorikeet_rpc.interceptors import Principal, request_facts

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Accepted:
    """Everything that is known before the engine starts."""

    tenant: str
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    num_samples: int
    adapter: ServedAdapter | None
    deadline_s: float | None
    clock: TokenClock
    # Of the call's log line. Held, because the context of a closing generator may be another call's.
    facts: dict[str, Any]


class GenerationService:
    """Runs generations. One instance a node."""

    def __init__(
        self,
        engine: Engine,
        encoder: PromptEncoder,
        catalog: Catalog,
        events: NodeEvents,
        tokens: TokenObserver,
        grammars: GrammarChecker,
    ) -> None:
        self._engine = engine
        self._encoder = encoder
        self._catalog = catalog
        self._events = events
        self._tokens = tokens
        self._grammars = grammars
        self._running = RunningRequests()

    async def stream(
        self, request: GenerationRequest, principal: Principal, time_remaining_s: float | None
    ) -> AsyncGenerator[tuple[str, GenerationPiece]]:
        """Yield (request id, piece), each small enough for a message, the last of each sample with `finish`.

        Closing the generator aborts the request. Where samples were finished by DEADLINE it ends with
        DeadlineError.

        Raises:
            ServiceError: see domain/errors; before the first piece the request was not accepted, after it the
                pieces so far stay valid.
        """
        accepted = await self._accept(request, principal, time_remaining_s)
        async with aclosing(self._stream(accepted)) as parts:
            async for part in parts:
                yield accepted.request_id, part

    async def _stream(self, accepted: _Accepted) -> AsyncGenerator[GenerationPiece]:
        with self._running.register(accepted.tenant, accepted.request_id) as engine_id:
            finishes: list[GenerationFinish] = []
            async with aclosing(self._run(accepted, engine_id)) as pieces:
                async for piece in pieces:
                    for part in piece.split():
                        yield part
                    if piece.finish is not None:
                        finishes.append(piece.finish)
            if any(finish.reason is FinishReason.DEADLINE for finish in finishes):
                num_tokens = sum(finish.output_tokens for finish in finishes)
                raise DeadlineError(f"the deadline passed after {num_tokens} output tokens")

    async def complete(
        self, request: GenerationRequest, principal: Principal, time_remaining_s: float | None
    ) -> tuple[str, list[GenerationPiece]]:
        """All pieces at once, with their request id.

        The reply must fit the 4 MiB that every client takes: 8000 tokens with 20 log-probabilities each do.

        Raises:
            LimitExceededError: it does not; before the engine works where the prompt and `max_tokens` make
                that certain.
            ServiceError: as `stream`.
        """
        check_complete_fits(request, 0)
        accepted = await self._accept(request, principal, time_remaining_s)
        check_complete_fits(request, len(accepted.prompt_token_ids))
        pieces: list[GenerationPiece] = []
        size = 0
        async with aclosing(self._stream(accepted)) as stream:
            async for piece in stream:
                pieces.append(piece)
                size += piece.max_wire_bytes
                if size > MAX_REPLY_BYTES:
                    raise reply_too_large(size)
        return accepted.request_id, pieces

    def abort(self, request_id: str, principal: Principal) -> bool:
        """Stop a running request of the caller's tenant. False: there is none of that id."""
        engine_id = self._running.find(principal.tenant, request_id)
        if engine_id is None:
            return False
        self._engine.abort(engine_id)
        log.info("request.aborted", generation_id=request_id)
        return True

    async def tokenize(self, prompt: TextPrompt | ChatPrompt) -> tuple[list[int], list[bytes], str]:
        """Token ids, their bytes, and the rendered chat."""
        return await self._encoder.tokenize(prompt)

    async def _accept(
        self, request: GenerationRequest, principal: Principal, time_remaining_s: float | None
    ) -> _Accepted:
        clock = TokenClock(time.perf_counter(), self._tokens)
        deadline_s = None if time_remaining_s is None else time.monotonic() + time_remaining_s
        adapter = None if request.adapter is None else self._catalog.resolve(request.adapter, principal)
        ids = (
            request.prompt.ids
            if isinstance(request.prompt, TokenPrompt)
            else tuple(await self._encoder.encode(request.prompt))
        )
        context = self._engine.info.limits.max_context_tokens
        if not ids:
            refuse(prompt_field(request.prompt), "without tokens", "send a text that has some")
        bad_words = await self._encoder.bad_words(request.sampling.bad_words)
        sampling = request.sampling.resolve(len(ids), context, secrets.randbits(64), bad_words)
        check_prompt_logprobs(request, len(ids))
        if (output := await self._structured_output(request, principal)) is not None:
            sampling = dataclasses.replace(sampling, structured_output=output)
        if deadline_s is not None and deadline_s <= time.monotonic():
            raise DeadlineError("the deadline passed before the request was accepted")
        request_id = request.request_id or uuid.uuid4().hex
        facts = request_facts()
        facts.update(
            generation_id=request_id,
            adapter=adapter.name.revision(adapter.digest) if adapter else None,
            prompt_tokens=len(ids),
            samples=request.sampling.num_samples,
        )
        log.debug("request.accepted", **facts)
        return _Accepted(
            principal.tenant,
            request_id,
            ids,
            sampling,
            request.sampling.num_samples,
            adapter,
            deadline_s,
            clock,
            facts,
        )

    async def _structured_output(
        self, request: GenerationRequest, principal: Principal
    ) -> StructuredOutput | None:
        constraint = request.sampling.constraint
        if constraint is None:
            return None
        field, value = shown(constraint)
        try:
            checked = await self._grammars.check(constraint, principal.tenant)
        except GrammarRefusedError as error:
            refuse(field, value, str(error))
        except GrammarsUnavailableError as error:
            raise GrammarsMissingError(f"{field}: {error}", metadata={"field": field}) from error
        return StructuredOutput(
            checked.grammar, ends_late=request.sampling.ends_late, num_bytes=checked.num_bytes
        )

    async def _run(self, accepted: _Accepted, engine_id: str) -> AsyncGenerator[GenerationPiece]:
        """Engine outputs to pieces; makes sure that the engine stops when the client does."""
        assemblies = [
            ReplyAssembly(
                self._encoder.tokenizer, accepted.prompt_token_ids, accepted.sampling, accepted.adapter, index
            )
            for index in range(accepted.num_samples)
        ]
        outputs = self._engine.generate(_engine_request(accepted, engine_id))
        try:
            async for output in outputs:
                assembly = assemblies[output.index]
                for part in assembly.prompt_pieces(output):
                    yield part
                    # A client that keeps up never waits, and Complete sends nothing: let the others go on.
                    await asyncio.sleep(0)
                was_stopped, num_before = assembly.is_stopped, assembly.num_output_tokens
                piece = assembly.push(output)
                if accepted.clock.came(assembly.num_output_tokens - num_before, output.index):
                    log.debug("request.first_token", ms=accepted.clock.first_token_ms)
                if assembly.is_stopped and not was_stopped and output.finish is None:
                    # The engine knows nothing of stop strings; its last word brings the usage and timings.
                    self._engine.abort(engine_id, output.index)
                if piece is not None:
                    yield piece
        finally:
            # No await before this: the client may be gone, and a closing generator may run in any context.
            if any(assembly.finish is None for assembly in assemblies):
                self._engine.abort(engine_id)
            self._report(accepted, assemblies)
            if isinstance(outputs, AsyncGenerator):
                await outputs.aclose()

    def _report(self, accepted: _Accepted, assemblies: Sequence[ReplyAssembly]) -> None:
        """The facts of the whole request: all samples' tokens, sample 0's times."""
        num_tokens = sum(assembly.num_output_tokens for assembly in assemblies)
        accepted.facts.update(
            output_tokens=num_tokens,
            finish_reason=_request_reason([assembly.finish for assembly in assemblies]),
            first_token_ms=accepted.clock.first_token_ms,
        )
        if (finish := assemblies[0].finish) is not None:
            times = {name: round(ms, 3) for name, ms in asdict(finish.timings).items()}
            accepted.facts.update(cached_tokens=finish.cached_tokens, **times)
        if accepted.adapter is not None:
            self._events.used(accepted.adapter.digest, len(accepted.prompt_token_ids), num_tokens)


def _request_reason(finishes: Sequence[GenerationFinish | None]) -> str | None:
    """Deadline or abort if a sample ended so, else as sample 0; None while one has not ended."""
    reasons = [finish.reason for finish in finishes if finish is not None]
    if len(reasons) < len(finishes):
        return None
    cut = {FinishReason.DEADLINE, FinishReason.ABORTED}
    return next((reason for reason in reasons if reason in cut), reasons[0]).value


def _engine_request(accepted: _Accepted, engine_id: str) -> EngineRequest:
    return EngineRequest(
        request_id=engine_id,
        tenant=accepted.tenant,
        prompt_token_ids=accepted.prompt_token_ids,
        sampling=accepted.sampling,
        digest=accepted.adapter.digest if accepted.adapter else None,
        deadline_s=accepted.deadline_s,
        num_samples=accepted.num_samples,
    )
