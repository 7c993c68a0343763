"""What a load's records mean in figures. Pure; each definition is the one of vLLM's own measurement.

- **TTFT**: from the call to the first piece with a token.
- **Inter-token**: between one piece with tokens and the next, shared evenly where a piece holds several; one
  value a token, over all requests.
- **End to end**: from the call to the last token.
- **Decode tokens/s of a request**: tokens after the first piece over the time from first to last piece: with
  one token a piece (n - 1) / (last - first). **Overall**: all its tokens over its end-to-end time.
- **Tokens/s total**: output tokens of all requests over the time from the first call to the last token; for a
  load of planned duration, the tokens that came within it over that duration.

- **Worst TTFT over its bucket**: requests are put in buckets of 64 prompt tokens; of each bucket of three or
  more, the longest TTFT over the bucket's median; the largest of these.

- **Burst share**: of the tokens after the first piece, those that came in one piece with others, or so soon
  after the piece before (under 0.3 ms, and under a quarter of the mean inter-token time) that no step lies
  between: whoever sends or receives them was late, and they say nothing about when they were made.

Latencies are of requests that ended as asked; percentiles interpolate linearly between the nearest ranks.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lorikeet_bench.load.driver import LoadOutcome
from lorikeet_bench.load.generator_cost import GeneratorCost
from lorikeet_bench.load.record import RequestRecord

_BUCKET_TOKENS = 64
# No decode step of a served model is as short.
_BURST_MS, _BURST_SHARE_OF_MEAN = 0.3, 0.25


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of one figure over a load; all zero where it was never seen."""

    count: int = 0
    mean: float = 0.0
    median: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> "Distribution":
        """Over all values."""
        data = np.asarray(values, np.float64)
        if not data.size:
            return cls()
        median, p90, p95, p99 = np.percentile(data, (50, 90, 95, 99)).tolist()
        return cls(int(data.size), float(data.mean()), median, p90, p95, p99, float(data.max()))


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """One run of one point."""

    requests: int
    failures: dict[str, int]
    duration_s: float
    input_tokens: int
    output_tokens: int
    tokens_per_s: float
    requests_per_s: float
    ttft_ms: Distribution
    inter_token_ms: Distribution
    end_to_end_ms: Distribution
    decode_tokens_per_s: Distribution
    overall_tokens_per_s: Distribution
    worst_ttft_over_bucket: float
    generator: GeneratorCost
    burst_share: float = 0.0


def summarize(outcome: LoadOutcome) -> LoadSummary:
    """The figures of a load."""
    records = outcome.records
    good = [record for record in records if record.is_ok and record.came_s]
    window_s, tokens, ended = _window(outcome, records)
    gaps_ms = inter_token_ms(good)
    return LoadSummary(
        requests=len(records),
        failures=dict(Counter(record.status for record in records if not record.is_ok)),
        duration_s=window_s,
        input_tokens=sum(record.prompt_tokens for record in records),
        output_tokens=tokens,
        tokens_per_s=tokens / window_s if window_s else 0.0,
        requests_per_s=ended / window_s if window_s else 0.0,
        ttft_ms=Distribution.of([1e3 * (record.came_s[0] - record.sent_s) for record in good]),
        inter_token_ms=(gaps := Distribution.of(gaps_ms)),
        end_to_end_ms=Distribution.of([1e3 * (record.came_s[-1] - record.sent_s) for record in good]),
        decode_tokens_per_s=Distribution.of(
            [rate for record in good if (rate := decode_rate(record)) is not None]
        ),
        overall_tokens_per_s=Distribution.of(
            [record.output_tokens / (record.came_s[-1] - record.sent_s) for record in good]
        ),
        worst_ttft_over_bucket=worst_ttft_over_bucket(good),
        generator=outcome.meter.cost(gaps.mean, _send_late_ms(outcome)),
        burst_share=burst_share(good, gaps.mean),
    )


def decode_rate(record: RequestRecord) -> float | None:
    """Tokens after the first piece over the time they took, a second; None where there is one piece only."""
    if len(record.came_s) < 2:
        return None
    took_s = record.came_s[-1] - record.came_s[0]
    return (record.output_tokens - record.counts[0]) / took_s if took_s > 0 else None


def burst_share(records: Sequence[RequestRecord], mean_ms: float) -> float:
    """Which share of the tokens after the first pieces came in bursts; `mean_ms` is their mean time apart."""
    limit_ms = min(_BURST_MS, _BURST_SHARE_OF_MEAN * mean_ms)
    in_bursts = total = 0
    for record in records:
        counts = np.array(record.counts[1:], np.int64)
        gaps_ms = 1e3 * np.diff(record.came_s)
        in_bursts += int(counts[(gaps_ms < limit_ms) | (counts > 1)].sum())
        total += int(counts.sum())
    return in_bursts / total if total else 0.0


def worst_ttft_over_bucket(records: Sequence[RequestRecord]) -> float:
    """How far one prompt length stands out from its neighbours; 0 where no bucket has three requests."""
    buckets: dict[int, list[float]] = defaultdict(list)
    for record in records:
        buckets[record.request.input_tokens // _BUCKET_TOKENS].append(record.came_s[0] - record.sent_s)
    ratios = [max(times) / statistics.median(times) for times in buckets.values() if len(times) >= 3]
    return max(ratios, default=0.0)


def inter_token_ms(records: Sequence[RequestRecord]) -> np.ndarray:
    """Every gap of every request, once a token."""
    gaps = [np.empty(0)]
    for record in records:
        counts = np.array(record.counts[1:], np.int64)
        gaps.append(np.repeat(1e3 * np.diff(record.came_s) / np.maximum(counts, 1), counts))
    return np.concatenate(gaps)


def _window(outcome: LoadOutcome, records: Sequence[RequestRecord]) -> tuple[float, int, int]:
    """Seconds, output tokens and requests ended, as the total rates count them."""
    came = [moment for record in records for moment in record.came_s]
    if not came:
        return 0.0, 0, 0
    counts = [count for record in records for count in record.counts]
    if outcome.until_s is None:
        begun_s = min(record.sent_s for record in records)
        return max(came) - begun_s, sum(counts), sum(record.is_ok for record in records)
    until_s = outcome.until_s
    tokens = sum(count for moment, count in zip(came, counts, strict=True) if moment <= until_s)
    ended = sum(record.is_ok and record.came_s[-1] <= until_s for record in records if record.came_s)
    return until_s - outcome.begun_s, tokens, ended


def _send_late_ms(outcome: LoadOutcome) -> float:
    late_s = [
        record.sent_s - outcome.begun_s - record.request.arrival_s
        for record in outcome.records
        if record.request.arrival_s is not None
    ]
    return 1e3 * sum(late_s) / len(late_s) if late_s else 0.0
