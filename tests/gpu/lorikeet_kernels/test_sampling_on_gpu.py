"""Sampling on a GPU against the reference on a CPU."""

from dataclasses import replace

import pytest
import torch

from lorikeet_kernels.sampling.penalties import Penalties, penalize, penalize_reference
from lorikeet_kernels.sampling.sampling import SamplingBatch, sample, sample_reference
from lorikeet_kernels.sampling.top_k_bounds import top_k_bounds, top_k_bounds_reference
from tests.support.device_waits import no_waiting

GPU = torch.device("cuda")


def make_batch(
    rows: int, top_p: float, temperature: float, *, seed: int = 0, top_k: int = 0, min_p: float = 0.0
) -> SamplingBatch:
    """Every third row greedy unless all are; every fourth without top_k, every fifth without min_p."""
    top_ks = torch.full((rows,), top_k)
    top_ks[3::4] = 0
    min_ps = torch.full((rows,), min_p)
    min_ps[4::5] = 0.0
    temperatures = torch.full((rows,), temperature)
    temperatures[::3] = 0.0
    return SamplingBatch(
        temperature=temperatures,
        top_k=top_ks,
        top_p=torch.full((rows,), top_p),
        seed=torch.arange(rows) + seed,
        position=torch.arange(rows) * 7,
        all_greedy=temperature == 0,
        any_cut=top_p < 1 or top_k > 0,
        any_top_k=top_k > 0,
        any_top_p=top_p < 1,
        min_p=min_ps if min_p else None,
    )


def on_gpu(batch: SamplingBatch) -> SamplingBatch:
    """The same parameters on the GPU."""
    return replace(
        batch,
        temperature=batch.temperature.to(GPU),
        top_k=batch.top_k.to(GPU),
        top_p=batch.top_p.to(GPU),
        seed=batch.seed.to(GPU),
        position=batch.position.to(GPU),
        min_p=None if batch.min_p is None else batch.min_p.to(GPU),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("temperature", [0.0, 0.8, 3.0])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 50), (5, 1000), (40, 32_000)])
def test_tokens_are_the_references(
    rows: int, vocab: int, temperature: float, top_p: float, dtype: torch.dtype
) -> None:
    """Peaked and flat rows; sums in another order may move the end of a nucleus, which few rows meet."""
    generator = torch.Generator().manual_seed(rows)
    logits = (torch.randn(rows, vocab, generator=generator) * torch.rand(rows, 1) * 8).to(dtype)
    logits[0, vocab // 2 :] = logits[0, : vocab - vocab // 2].clone()  # ties
    unequal = 0
    for seed in range(4):
        batch = make_batch(rows, top_p, temperature, seed=1000 * seed)
        got = sample(logits.to(GPU), on_gpu(batch)).cpu()
        unequal += int((got != sample_reference(logits, batch)).sum())
    assert unequal <= rows * 4 // 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
@pytest.mark.parametrize(("top_k", "min_p"), [(1, 0.0), (50, 0.0), (0, 0.05), (40, 0.02), (900, 1e-4)])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1000), (5, 3001), (40, 32_000)])
def test_all_cuts(rows: int, vocab: int, top_k: int, min_p: float, top_p: float, dtype: torch.dtype) -> None:
    """As above; what is drawn lies within top_k without an exception."""
    generator = torch.Generator().manual_seed(rows)
    logits = (torch.randn(rows, vocab, generator=generator) * torch.rand(rows, 1) * 8).to(dtype)
    unequal = 0
    for seed in range(4):
        batch = make_batch(rows, top_p, 1.2, seed=1000 * seed, top_k=top_k, min_p=min_p)
        got = sample(logits.to(GPU), on_gpu(batch)).cpu()
        unequal += int((got != sample_reference(logits, batch)).sum())
        bounds, ends = top_k_bounds_reference(logits, batch.top_k)
        drawn = logits.float().gather(1, got.unsqueeze(1)).squeeze(1)
        assert bool(((drawn > bounds) | ((drawn == bounds) & (got < ends))).all())
    assert unequal <= rows * 4 // 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_chunks", [16, 64])
def test_top_k_bounds_are_exact(dtype: torch.dtype, num_chunks: int) -> None:
    """Bit for bit, at gpt-oss's vocabulary: peaked, flat, tied, masked and constant rows."""
    logits = torch.randn(8, 201_088, device=GPU) * 4
    logits[1] = logits[1].round()
    logits[2] = torch.where(logits[2] > 0, 0.0, -0.0)
    logits[3, 100:] = float("-inf")
    logits[4] = -3.0
    logits = logits.to(dtype)
    for k in (1, 20, 1000, 100_000, 201_088):
        top_k = torch.full((8,), k, device=GPU)
        top_k[7] = 0
        got = top_k_bounds(logits, top_k, num_chunks=num_chunks)
        expected = top_k_bounds_reference(logits, top_k)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


def test_penalties() -> None:
    """At gpt-oss's vocabulary, rows and places in any order; the others keep their bits."""
    logits = torch.randn(40, 201_088, device=GPU) * 4
    logits[:, 77] = float("-inf")
    counts = torch.randint(0, 7, (64, 201_088), dtype=torch.int32, device=GPU)
    rows, slots = torch.randperm(40, device=GPU)[:17], torch.randperm(64, device=GPU)[:17]
    repetition = torch.rand(17, device=GPU) + 0.5
    penalties = Penalties(
        counts, rows, slots, repetition, torch.randn(17, device=GPU), torch.randn(17, device=GPU)
    )
    before, expected = logits.clone(), logits.clone()
    penalize(logits, penalties)
    penalize_reference(expected, penalties)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    others = torch.ones(40, dtype=torch.bool, device=GPU)
    others[rows] = False
    assert torch.equal(logits[others], before[others])


def test_no_wait_for_the_device() -> None:
    """With every parameter at once nothing asks the device for a value."""
    logits = torch.randn(20, 9000, device=GPU)
    batch = on_gpu(make_batch(20, 0.8, 1.0, top_k=30, min_p=0.01))
    places, values = torch.arange(20, device=GPU), torch.ones(20, device=GPU)
    counts = torch.zeros(20, 9000, dtype=torch.int32, device=GPU)
    penalties = Penalties(counts, places, places, values, values, values)
    penalize(logits, penalties)
    sample(logits, batch)
    with no_waiting():
        penalize(logits, penalties)
        sample(logits, batch)


def test_rows_without_a_distribution() -> None:
    """NaN, infinity and masks, at gpt-oss's vocabulary."""
    logits = torch.randn(4, 201_088, device=GPU)
    logits[1, 200_000] = float("nan")
    logits[2, 5] = float("inf")
    logits[3, :-1] = float("-inf")
    batch = on_gpu(make_batch(4, 0.9, 1.0))
    assert sample(logits, batch).tolist()[1:] == [-1, -1, 201_087]


def test_capture() -> None:
    """A captured call follows new logits and seeds."""
    logits = torch.randn(8, 9000, device=GPU)
    batch = on_gpu(make_batch(8, 0.8, 1.0, top_k=300, min_p=1e-3))
    sample(logits, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(logits, batch)
    logits.normal_()
    batch.seed.add_(5)
    graph.replay()
    assert torch.equal(tokens, sample(logits, batch))
