"""Where requests with structured output wait until their grammars are compiled, beside the step loop.

The front end has had each grammar compiled before, in a process that it could stop, so that what comes here
is bounded; but it still takes from a millisecond to a second or two, which no step should wait for. The
scheduler sees such a request once its matchers are there.

Every sample of every request has a compilation of its own: llguidance's copies share what counts against its
limits, and an answer would end where others have used them up. Tenants take turns, a matcher at a time.
"""

import dataclasses
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from inference_service.domain.request import EngineRequest
from inference_service.domain.structured_output import (
    GrammarRefusedError,
    GrammarsUnavailableError,
    TokenMatcher,
)
from inference_service.text.grammar import CHECK_STACK_BYTES, GrammarCompiler

_THREADS = 2
# What has passed the check on a stack a fraction of this one cannot overflow it here.
_STACK_BYTES = 16 * CHECK_STACK_BYTES
# What the matchers of waiting and running requests may take at first, by the checker's figures. A common one
# takes 0.1 MiB, the largest 16: this many requests that nobody means well with wait here in place of the
# scheduler's queue. One tenant has half of it.
_MAX_BYTES = 4 << 30
_LEAST_BYTES = 1 << 17

log = structlog.get_logger()


class _Job:
    """A request and its matchers so far."""

    def __init__(self, request: EngineRequest) -> None:
        output = request.sampling.structured_output
        assert output is not None
        self.request = request
        self.output = output
        self.bytes_each = max(output.num_bytes, _LEAST_BYTES)
        self.num_begun = 0
        self.matchers: list[TokenMatcher] = []
        self.refusal = ""
        self.is_left = False

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to wait for."""
        return bool(self.refusal) or len(self.matchers) == self.request.num_samples

    def compiled_request(self) -> EngineRequest:
        """With a matcher for each sample."""
        first, *others = self.matchers
        output = dataclasses.replace(self.output, matcher=first, other_matchers=tuple(others))
        sampling = dataclasses.replace(self.request.sampling, structured_output=output)
        return dataclasses.replace(self.request, sampling=sampling)


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
        self._jobs: dict[str, _Job] = {}
        # Of the jobs that have matchers to begin, by tenant in the order of turns.
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._num_working = 0
        self._live_bytes: Counter[str] = Counter()
        # What matchers gave back, by whatever thread dropped them.
        self._freed: deque[tuple[str, int]] = deque()
        self._lock = threading.Lock()

    def add(self, request: EngineRequest) -> None:
        """Take in a request with structured output."""
        job = self._jobs[request.request_id] = _Job(request)
        with self._lock:
            self._queues.setdefault(request.tenant, deque()).append(job)
        self._work_on()

    def withdraw(self, request_id: str) -> EngineRequest | None:
        """A request that still waits here, which it then does no longer."""
        job = self._jobs.get(request_id)
        return None if job is None else self._leave(job)

    def take_ready(self, now_s: float) -> list[tuple[EngineRequest, str]]:
        """Requests with their matchers, in the order they came; or, instead, why there is no matcher.

        Those whose deadline has passed come as they are: the scheduler ends them at once.
        """
        if not self._jobs:
            return []
        self._work_on()
        with self._lock:
            ready = [job for job in self._jobs.values() if job.is_done or _is_late(job.request, now_s)]
        taken: list[tuple[EngineRequest, str]] = []
        for job in ready:
            is_compiled = job.is_done and not job.refusal
            request = job.compiled_request() if is_compiled else job.request
            self._leave(job)
            taken.append((request, job.refusal))
        return taken

    def close(self) -> None:
        """Begin nothing more: the threads end with what they have in hand."""
        with self._lock:
            self._queues.clear()

    def _leave(self, job: _Job) -> EngineRequest:
        del self._jobs[job.request.request_id]
        with self._lock:
            job.is_left = True
            queue = self._queues.get(job.request.tenant, ())
            if job in queue:
                self._dequeue(job)
            job.matchers = []
        return job.request

    def _work_on(self) -> None:
        """Have as many threads at work as find something."""
        with self._lock:
            jobs = [queue[0] for queue in self._queues.values()]
            num_wanted = sum(job.request.num_samples - job.num_begun for job in jobs)
            num_starting = min(_THREADS - self._num_working, num_wanted)
            self._num_working += num_starting
        if not num_starting:
            return
        # The size is the process's for threads to come: the pool starts its own in `submit`.
        usual = threading.stack_size(_STACK_BYTES)
        try:
            for _ in range(num_starting):
                self._threads.submit(self._work)
        finally:
            threading.stack_size(usual)

    def _work(self) -> None:
        while True:
            with self._lock:
                job = self._next()
                if job is None:
                    self._num_working -= 1
                    return
            matcher, refusal = self._compiled(job.output.grammar)
            with self._lock:
                self._take_in(job, matcher, refusal)
                is_news = job.is_done
            del matcher
            if is_news:
                self._wake()

    def _next(self) -> _Job | None:
        """The job whose next matcher is to be compiled; under the lock, as all that follow."""
        while self._freed:
            tenant, num_bytes = self._freed.popleft()
            self._live_bytes[tenant] -= num_bytes
            if not self._live_bytes[tenant]:
                del self._live_bytes[tenant]
        for tenant in tuple(self._queues):
            job = self._queues[tenant][0]
            self._queues.move_to_end(tenant)
            if not job.num_begun:
                num_bytes = job.request.num_samples * job.bytes_each
                if not self._fits(tenant, num_bytes):
                    continue
                self._live_bytes[tenant] += num_bytes
            job.num_begun += 1
            if job.num_begun == job.request.num_samples:
                self._dequeue(job)
            return job
        return None

    def _fits(self, tenant: str, num_bytes: int) -> bool:
        own = self._live_bytes[tenant]
        if not own:  # whatever it takes: it would never fit
            return True
        return own + num_bytes <= _MAX_BYTES // 2 and self._live_bytes.total() + num_bytes <= _MAX_BYTES

    def _dequeue(self, job: _Job) -> None:
        queue = self._queues[job.request.tenant]
        queue.remove(job)
        if not queue:
            del self._queues[job.request.tenant]
        if num_left := job.request.num_samples - job.num_begun if job.num_begun else 0:
            self._freed.append((job.request.tenant, num_left * job.bytes_each))

    def _take_in(self, job: _Job, matcher: TokenMatcher | None, refusal: str) -> None:
        share = (job.request.tenant, job.bytes_each)
        if matcher is None:
            self._freed.append(share)
        else:
            weakref.finalize(matcher, self._freed.append, share).atexit = False
            if not job.is_left:
                job.matchers.append(matcher)
        if refusal and not job.refusal:
            job.refusal = refusal
            if job in self._queues.get(job.request.tenant, ()):
                self._dequeue(job)

    def _compiled(self, grammar: str) -> tuple[TokenMatcher | None, str]:
        """A matcher, or why there is none."""
        try:
            with self._compiler_lock:
                if self._compiler is None:
                    self._compiler = GrammarCompiler(self._model_dir, self._vocab_size, self._end_token_ids)
            return self._compiler.compile(grammar), ""
        except (GrammarRefusedError, GrammarsUnavailableError, OSError) as error:
            return None, str(error)
        except BaseException as error:  # a panic in native code is one; the request must end
            log.exception("grammar.compilation_failed")
            return None, f"compiling it failed: {type(error).__name__}"


def _is_late(request: EngineRequest, now_s: float) -> bool:
    return request.deadline_s is not None and request.deadline_s <= now_s
