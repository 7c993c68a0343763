"""Where requests with structured output wait until their grammars are compiled, beside the step loop.

The front end has had each grammar compiled before, in a process that it could stop, so that what comes here
is bounded; but it still takes from a millisecond to a second or two, which no step should wait for. The
scheduler sees such a request once its matcher is there.
"""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from inference_service.domain.request import EngineRequest
from inference_service.domain.structured_output import (
    GrammarRefusedError,
    GrammarsUnavailableError,
    TokenMatcher,
)
from inference_service.text.grammar import GrammarCompiler

_THREADS = 2
# Each at most some tens of MiB, for what is mostly a few schemas used again and again.
_MAX_KEPT = 32


class GrammarGate:
    """One caller: the engine loop. Nothing is loaded or started before the first request that needs it."""

    def __init__(
        self, model_dir: Path, vocab_size: int, end_token_ids: Sequence[int], wake: Callable[[], None]
    ) -> None:
        """`wake` is called from other threads when `take_ready` may have something."""
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._wake = wake
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = threading.Lock()
        self._kept: OrderedDict[str, TokenMatcher] = OrderedDict()
        self._compiling: dict[str, Future[TokenMatcher]] = {}
        self._waiting: dict[str, EngineRequest] = {}

    def add(self, request: EngineRequest) -> None:
        """Take in a request with structured output."""
        grammar = _grammar(request)
        self._waiting[request.request_id] = request
        if grammar in self._kept or grammar in self._compiling:
            return
        self._compiling[grammar] = compiling = self._threads.submit(self._compile, grammar)
        compiling.add_done_callback(lambda _: self._wake())

    def withdraw(self, request_id: str) -> EngineRequest | None:
        """A request that still waits here, which it then does no longer."""
        return self._waiting.pop(request_id, None)

    def take_ready(self, now_s: float) -> list[tuple[EngineRequest, str]]:
        """Requests with their matchers, in the order they came; or, instead, why there is no matcher.

        Those whose deadline has passed come as they are: the scheduler ends them at once.
        """
        if not self._waiting and not self._compiling:
            return []
        refusals: dict[str, str] = {}
        for grammar, compiling in list(self._compiling.items()):
            if compiling.done():
                del self._compiling[grammar]
                try:
                    self._kept[grammar] = compiling.result()
                except (GrammarRefusedError, GrammarsUnavailableError, OSError) as error:
                    refusals[grammar] = str(error)
        ready = [
            request
            for request in self._waiting.values()
            if _grammar(request) not in self._compiling or _is_late(request, now_s)
        ]
        taken = [self._taken(request, refusals) for request in ready]
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return taken

    def _taken(self, request: EngineRequest, refusals: dict[str, str]) -> tuple[EngineRequest, str]:
        del self._waiting[request.request_id]
        grammar, output = _grammar(request), request.sampling.structured_output
        assert output is not None
        if grammar in self._compiling:
            return request, ""
        if refusal := refusals.get(grammar):
            return request, refusal
        self._kept.move_to_end(grammar)
        output = dataclasses.replace(output, matcher=self._kept[grammar])
        sampling = dataclasses.replace(request.sampling, structured_output=output)
        return dataclasses.replace(request, sampling=sampling), ""

    def _compile(self, grammar: str) -> TokenMatcher:
        with self._compiler_lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._model_dir, self._vocab_size, self._end_token_ids)
        return self._compiler.compile(grammar)


def _is_late(request: EngineRequest, now_s: float) -> bool:
    return request.deadline_s is not None and request.deadline_s <= now_s


def _grammar(request: EngineRequest) -> str:
    assert request.sampling.structured_output is not None
    return request.sampling.structured_output.grammar
