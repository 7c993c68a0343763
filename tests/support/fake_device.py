"""Deterministic stand-ins for what sits behind the engine's ports: runner, host pool, arena, payload source.

The runner keeps what a real cache would hold, block by block, and checks at every token that its whole past
is there and was computed for the same adapter: a wrong block, a stale prefix or a reused slot fails the test.
"""

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

from inference_service.domain.adapter import BASE_SLOT
from inference_service.domain.errors import CapacityError, PayloadError, PayloadMissingError
from inference_service.domain.request import TokenLogprobs
from inference_service.domain.step import (
    ModelRunnerOutput,
    NewRequest,
    SampledRequest,
    ScheduledRequest,
    SchedulerOutput,
)
from lorikeet_contract.manifest import Manifest, PayloadDtype

VOCAB_SIZE = 1000


def next_token(digest: str | None, token_ids: Sequence[int]) -> int:
    """The fake model: the next token follows from the adapter, the length and the last token."""
    text = f"{digest}|{len(token_ids)}|{token_ids[-1]}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") % VOCAB_SIZE


def expected_tokens(digest: str | None, prompt: Sequence[int], count: int) -> list[int]:
    """What the fake model generates."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(digest, token_ids))
    return token_ids[len(prompt) :]


def make_manifest(name: str, num_bytes: int = 100) -> Manifest:
    """A manifest that differs by name; without layers it takes `num_bytes`."""
    return Manifest(
        base_digest=name, schema_digest="", dtype=PayloadDtype.FLOAT32, payload_bytes=num_bytes, layers=()
    )


class FakeHostPool:
    """Counts bytes; `bad` digests fail their checksum, `block` holds readers up until set."""

    def __init__(self, total_bytes: int = 10_000) -> None:
        self.total_bytes = total_bytes
        self.held: dict[str, int] = {}
        self.bad: set[str] = set()
        self.reads: list[str] = []
        self.read_s = 0.0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of all revisions."""
        return sum(self.held.values())

    def read(self, manifest: Manifest, payload_path: str) -> int:
        """Take a revision in."""
        time.sleep(self.read_s)
        with self._lock:
            self.reads.append(manifest.digest)
            if manifest.digest in self.bad:
                raise PayloadError(f"layer 0 of {manifest.digest} does not match its sha256")
            assert manifest.digest not in self.held, "read twice"
            if self.used_bytes + manifest.payload_bytes > self.total_bytes:
                raise CapacityError("the host pool is full")
            self.held[manifest.digest] = manifest.payload_bytes
            return manifest.payload_bytes

    def bytes_needed(self, manifest: Manifest) -> int:
        """The payload's own size."""
        return manifest.payload_bytes

    def drop(self, digest: str) -> None:
        """Forget."""
        with self._lock:
            self.held.pop(digest, None)


class FakeArena:
    """Slots whose copies end after `polls_per_copy` polls; misuse fails an assertion."""

    def __init__(
        self, pool: FakeHostPool, num_slots: int = 2, total_bytes: int = 10_000, polls_per_copy: int = 1
    ) -> None:
        self.num_slots = num_slots
        self.total_bytes = total_bytes
        self.polls_per_copy = polls_per_copy
        self.digest_of: dict[int, str] = {}
        self.refuse: set[str] = set()
        # Refused for want of a gap that is large enough, until `compact` is called.
        self.fragmented: set[str] = set()
        self.num_compactions = 0
        self._bytes_of: dict[int, int] = {}
        self._copying: dict[int, int] = {}
        self._pool = pool

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(self._bytes_of.values())

    def compact(self) -> bool:
        """Move all together."""
        has_moved = bool(self.fragmented)
        self.num_compactions += has_moved
        self.fragmented.clear()
        return has_moved

    def begin_copy(self, digest: str, slot: int) -> bool:
        """Start a copy; the revision must be in the pool and the slot empty."""
        assert 0 <= slot < self.num_slots
        assert slot not in self._bytes_of, "slot in use"
        assert digest not in self.digest_of.values(), "copied twice"
        num_bytes = self._pool.held[digest]
        if digest in self.refuse | self.fragmented or self.used_bytes + num_bytes > self.total_bytes:
            return False
        self._bytes_of[slot] = num_bytes
        self.digest_of[slot] = digest
        self._copying[slot] = self.polls_per_copy
        return True

    def poll(self) -> Sequence[int]:
        """Slots whose copies just ended."""
        self._copying = {slot: left - 1 for slot, left in self._copying.items()}
        done = [slot for slot, left in self._copying.items() if left <= 0]
        for slot in done:
            del self._copying[slot]
        return done

    def release(self, slot: int) -> None:
        """Empty a slot that is in use."""
        del self._bytes_of[slot], self.digest_of[slot]
        self._copying.pop(slot, None)

    def active(self, slot: int) -> str | None:
        """The digest by which a step of this slot computes."""
        if slot == BASE_SLOT:
            return None
        assert slot not in self._copying, "a step uses a slot whose copy still runs"
        return self.digest_of[slot]


class FakeSource:
    """Revisions by digest; unknown ones are missing. `damaged` are those whose cached copy is."""

    def __init__(self) -> None:
        self.manifests: dict[str, Manifest] = {}
        self.fetches: list[str] = []
        self.damaged: set[str] = set()

    def add(self, name: str, num_bytes: int = 100) -> str:
        """Make a revision available; returns its digest."""
        manifest = make_manifest(name, num_bytes)
        self.manifests[manifest.digest] = manifest
        return manifest.digest

    def fetch(self, digest: str, store_path: str) -> tuple[Manifest, str]:
        """Find a revision."""
        self.fetches.append(digest)
        if digest not in self.manifests:
            raise PayloadMissingError(f"revision {digest} is not here")
        return self.manifests[digest], f"/nowhere/{digest}"

    def cached(self) -> Sequence[str]:
        """Nothing is on disk but what was added."""
        return tuple(self.manifests)

    def remove(self, digest: str) -> bool:
        """Forget; of a damaged one only the damage, as if the store still had it."""
        if digest in self.damaged:
            self.damaged.remove(digest)
            return True
        self.manifests.pop(digest, None)
        return False

    def make_room(self, num_bytes: int) -> bool:
        """There is always room."""
        return True


class ManualExecutor(Executor):
    """Runs jobs when told to, so that a test decides what is still in flight."""

    def __init__(self) -> None:
        self._jobs: list[Callable[[], None]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Keep a job."""
        future: Future[Any] = Future()

        def job() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 (an executor hands on whatever comes)
                future.set_exception(error)

        self._jobs.append(job)
        return future

    def run_one(self) -> bool:
        """Run the oldest job; False if there is none."""
        if self._jobs:
            self._jobs.pop(0)()
            return True
        return False

    def run_all(self) -> None:
        """Run every job."""
        while self.run_one():
            pass


@dataclass
class _Held:
    new: NewRequest
    token_ids: list[int]
    blocks: list[int]
    num_computed: int


@dataclass
class FakeRunner:
    """Computes with `next_token`; see the module's docstring for what it checks."""

    arena: FakeArena
    block_tokens: int = 4
    max_running: int = 1000
    step_s: float = 0.0
    steps: list[SchedulerOutput] = field(default_factory=list)
    is_asynchronous: bool = False
    _launched: deque[ModelRunnerOutput] = field(default_factory=deque)
    _held: dict[str, _Held] = field(default_factory=dict)
    _cache: dict[int, tuple[str | None, tuple[int, ...]]] = field(default_factory=dict)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step."""
        time.sleep(self.step_s)
        self.steps.append(step)
        for request_id in step.finished:
            self._held.pop(request_id, None)
        for new in step.new:
            assert new.request_id not in self._held
            self._held[new.request_id] = _Held(
                new, list(new.token_ids), list(new.block_ids), new.num_computed_tokens
            )
        assert len(self._held) <= self.max_running
        self._check_step(step)
        return ModelRunnerOutput(step.step, tuple(self._compute(share) for share in step.scheduled))

    def launch(self, step: SchedulerOutput) -> None:
        """Run a step and keep what it brings."""
        self._launched.append(self.execute(step))
        assert len(self._launched) <= 2, "more than two steps in flight"

    def collect(self) -> ModelRunnerOutput:
        """What the oldest step brought."""
        return self._launched.popleft()

    def digests(self, step: SchedulerOutput) -> set[str]:
        """Distinct adapters of a step."""
        found = {self.arena.active(self._held[s.request_id].new.slot) for s in step.scheduled}
        return {digest for digest in found if digest is not None}

    def _check_step(self, step: SchedulerOutput) -> None:
        ids = [share.request_id for share in step.scheduled]
        assert len(set(ids)) == len(ids), "scheduled twice in a step"
        assert len(self.digests(step)) <= self.arena.num_slots
        written: set[int] = set()
        for share in step.scheduled:
            held = self._held[share.request_id]
            held.blocks += share.new_block_ids
            first = share.num_computed_tokens // self.block_tokens
            last = (share.num_computed_tokens + share.num_scheduled_tokens - 1) // self.block_tokens
            mine = set(held.blocks[first : last + 1])
            assert not mine & written, "two requests write one block in a step"
            written |= mine

    def _compute(self, share: ScheduledRequest) -> SampledRequest:
        held = self._held[share.request_id]
        digest = self.arena.active(held.new.slot)
        assert share.num_computed_tokens == held.num_computed, "a gap or an overlap in what is computed"
        assert share.num_scheduled_tokens > 0
        end = share.num_computed_tokens + share.num_scheduled_tokens
        assert end <= len(held.token_ids), "more tokens scheduled than are known"
        for position in range(share.num_computed_tokens, end):
            self._write(held, position, digest)
        held.num_computed = end
        self._check_past(held, end, digest)
        prompt_logprobs = self._prompt_logprobs(held, share)
        if end < len(held.token_ids):
            return SampledRequest(share.request_id, prompt_logprobs=prompt_logprobs)
        token_id = next_token(digest, held.token_ids)
        held.token_ids.append(token_id)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if held.new.sampling.logprobs is not None:
            logprobs = (TokenLogprobs(-token_id / VOCAB_SIZE),)
        return SampledRequest(share.request_id, (token_id,), logprobs, prompt_logprobs)

    def _write(self, held: _Held, position: int, digest: str | None) -> None:
        block = held.blocks[position // self.block_tokens]
        offset = position % self.block_tokens
        old = self._cache.get(block, (digest, ()))[1] if offset else ()
        assert len(old) >= offset, "a block is filled with a gap"
        self._cache[block] = (digest, (*old[:offset], held.token_ids[position]))

    def _check_past(self, held: _Held, end: int, digest: str | None) -> None:
        for start in range(0, end, self.block_tokens):
            wanted = tuple(held.token_ids[start : min(start + self.block_tokens, end)])
            owner, found = self._cache[held.blocks[start // self.block_tokens]]
            assert owner == digest, "keys and values of another adapter"
            assert found[: len(wanted)] == wanted, "keys and values of other tokens"

    def _prompt_logprobs(self, held: _Held, share: ScheduledRequest) -> tuple[TokenLogprobs, ...]:
        if held.new.sampling.prompt_logprobs is None:
            return ()
        start = share.num_computed_tokens + 1
        end = min(start + share.num_scheduled_tokens, held.new.num_prompt_tokens)
        return tuple(TokenLogprobs(-held.token_ids[p] / VOCAB_SIZE) for p in range(start, end))
