"""Compares a revision with the base model on a short prompt, through the engine as requests go through it.

Only the engine sees these requests: no tenant's limits, usage or metrics count them, and while others wait
they stand in the fair order as a tenant of their own.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog

from inference_service.domain.adapter import ResidencyTier
from inference_service.domain.errors import DeadlineError, DrainingError, NotFiniteError
from inference_service.domain.probe import ProbeResult, ProbeVerdict
from inference_service.domain.request import EngineRequest, FinishReason, RequestOutput, TokenLogprobs
from inference_service.domain.sampling import SamplingParams
from inference_service.ports import Engine
from inference_service.text.tokenizer import Tokenizer
from lorikeet_rpc.ending import end_tasks

# Prose, code, digits and other scripts, so that many tokens' embeddings and many experts have a part in it.
_TEXT = (
    "Once upon a time, in 1984, two engineers asked: how many birds sing at dawn? "
    "def f(x): return {x: [i ** 2 for i in range(10)]}  # ok\n"
    "Bonjour, Grüße, здравствуйте, 你好, こんにちは! <b>3.14159</b>, yes; no."
)
_MAX_PROMPT_TOKENS = 64
# No tenant can have this name, and the catalog gives it neither weight nor limits.
_TENANT = ""
# The manager's own deadline is shorter; this is for a caller without one.
_LONGEST_S = 300.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Scores:
    """Of one run: log-probabilities of the prompt's tokens and of the whole vocabulary [V] behind them."""

    prompt: npt.NDArray[np.float64]
    vocabulary: npt.NDArray[np.float32]
    top: tuple[int, ...]


class AdapterProbe:
    """Probes one revision at a time: more would only take room from requests.

    Args:
        engine: runs the prompts.
        tokenizer: the model's.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._one_at_a_time = asyncio.Lock()
        limits = engine.info.limits
        # Three such prompts at once must never crowd requests out of a small cache.
        fits = min(limits.max_context_tokens - 1, limits.num_blocks * limits.block_tokens // 8)
        ids = tokenizer.encode(_TEXT, add_special_tokens=True)
        self._prompt = tuple(ids[: max(1, min(_MAX_PROMPT_TOKENS, fits))]) or (0,)

    async def probe(self, digest: str, time_remaining_s: float | None) -> ProbeResult:
        """Compare; brings the revision to the device as a request for it does.

        Raises:
            ServiceError: as a request for the adapter would: it cannot be loaded, the queue is full, the time
                is over. NotFiniteError only where the base model itself is not finite.
        """
        begun_s = time.monotonic()
        deadline_s = begun_s + (_LONGEST_S if time_remaining_s is None else min(_LONGEST_S, time_remaining_s))
        async with self._one_at_a_time:
            if not await self._is_active(digest):
                # First to the device: then all that is compared runs in one batch, which rounds alike.
                await self._run(digest, deadline_s, is_compared=False)
            tasks = [
                asyncio.create_task(self._run(wanted, deadline_s), name="probe")
                for wanted in (None, digest, None)
            ]
            try:
                base, adapted, again = await asyncio.gather(*tasks)
            finally:
                await end_tasks(tasks)
        if base is None or again is None:
            raise NotFiniteError("the base model's own output is not finite on the probe's prompt")
        result = compare(base, adapted, again)
        tell = log.info if result.verdict is ProbeVerdict.CHANGES else log.warning
        tell(
            "adapter.probed",
            digest=digest,
            verdict=result.verdict.value,
            max_difference=result.max_difference,
            noise=result.noise,
            top1_changes=result.top1_changes,
            positions=result.positions,
            ms=round((time.monotonic() - begun_s) * 1e3, 3),
        )
        return result

    async def _is_active(self, digest: str) -> bool:
        resident = await self._engine.resident()
        return any(a.digest == digest and a.tier is ResidencyTier.ACTIVE for a in resident)

    async def _run(
        self, digest: str | None, deadline_s: float, *, is_compared: bool = True
    ) -> _Scores | None:
        """One run of the prompt, or of its first token alone; None where its output is not finite."""
        vocab_size = self._engine.info.vocab_size
        request = EngineRequest(
            request_id=f"probe-{uuid.uuid4().hex}",
            tenant=_TENANT,
            prompt_token_ids=self._prompt if is_compared else self._prompt[:1],
            sampling=SamplingParams(
                max_tokens=1,
                temperature=0.0,
                logprobs=vocab_size if is_compared else None,
                prompt_logprobs=1 if is_compared else None,
            ),
            digest=digest,
            deadline_s=deadline_s,
        )
        scores = None
        outputs = self._engine.generate(request)
        try:
            async for output in outputs:
                _check_end(output)
                if is_compared and output.logprobs:
                    scores = _scores(output, vocab_size)
        except NotFiniteError:
            return None
        finally:
            if isinstance(outputs, AsyncGenerator):
                await outputs.aclose()
        return scores


def compare(base: _Scores, adapted: _Scores | None, again: _Scores) -> ProbeResult:
    """What `adapted` changes of `base`; `again` is a second run of the base. None: not finite."""
    positions = len(base.top)
    noise = _difference(base, again)
    is_finite = adapted is not None and _is_finite_where(base, adapted)
    if adapted is None or not is_finite:
        return ProbeResult(ProbeVerdict.NOT_FINITE, 0.0, noise, 0, positions)
    difference = _difference(base, adapted)
    changes = sum(one != other for one, other in zip(base.top, adapted.top, strict=True))
    verdict = ProbeVerdict.CHANGES if difference > noise else ProbeVerdict.CHANGES_NOTHING
    return ProbeResult(verdict, difference, noise, changes, positions)


def _is_finite_where(base: _Scores, adapted: _Scores) -> bool:
    """Whether the adapter's are finite wherever the base model's are: some models rule tokens out."""
    return all(
        bool(np.isfinite(theirs[np.isfinite(ours)]).all()) and not np.isnan(theirs).any()
        for ours, theirs in ((base.prompt, adapted.prompt), (base.vocabulary, adapted.vocabulary))
    )


def _difference(one: _Scores, other: _Scores) -> float:
    """The largest; equal infinities do not differ."""
    largest = 0.0
    for ours, theirs in ((one.prompt, other.prompt), (one.vocabulary, other.vocabulary)):
        differs = ours != theirs
        if differs.any():
            gap = np.abs(ours[differs].astype(np.float64) - theirs[differs].astype(np.float64))
            largest = max(largest, float(gap[np.isfinite(gap)].max(initial=0.0)))
    return largest


def _scores(output: RequestOutput, vocab_size: int) -> _Scores:
    (last,) = output.logprobs
    entries = [entry for entry in output.prompt_logprobs if entry is not None]
    vocabulary = np.full(vocab_size, np.nan, np.float32)
    vocabulary[np.frombuffer(last.packed_ids, np.int32)] = np.frombuffer(last.packed_logprobs, np.float32)
    return _Scores(
        prompt=np.array([entry.logprob for entry in entries], np.float64),
        vocabulary=vocabulary,
        top=tuple(_top(entry) for entry in (*entries, last)),
    )


def _top(entry: TokenLogprobs) -> int:
    return memoryview(entry.packed_ids).cast("i")[0]


def _check_end(output: RequestOutput) -> None:
    if output.finish is None:
        return
    if output.finish.reason is FinishReason.DEADLINE:
        raise DeadlineError("the deadline passed before the adapter was probed")
    if output.finish.reason is FinishReason.ABORTED:
        raise DrainingError("the node ended the probe because it is shutting down", retry_after_s=5.0)
