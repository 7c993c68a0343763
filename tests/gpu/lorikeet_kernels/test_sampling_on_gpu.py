"""Sampling on a GPU against the reference on a CPU."""

import pytest
import torch

from lorikeet_kernels.sampling import SamplingBatch, sample, sample_reference

GPU = torch.device("cuda")


def make_batch(rows: int, top_p: float, temperature: float, *, seed: int = 0) -> SamplingBatch:
    """Every third row greedy unless all are."""
    temperatures = torch.full((rows,), temperature)
    temperatures[::3] = 0.0
    return SamplingBatch(
        temperature=temperatures,
        top_k=torch.zeros(rows, dtype=torch.int64),
        top_p=torch.full((rows,), top_p),
        seed=torch.arange(rows) + seed,
        position=torch.arange(rows) * 7,
        all_greedy=temperature == 0,
        any_cut=top_p < 1,
        any_top_k=False,
    )


def on_gpu(batch: SamplingBatch) -> SamplingBatch:
    """The same parameters on the GPU."""
    return SamplingBatch(
        batch.temperature.to(GPU),
        batch.top_k.to(GPU),
        batch.top_p.to(GPU),
        batch.seed.to(GPU),
        batch.position.to(GPU),
        batch.all_greedy,
        batch.any_cut,
        batch.any_top_k,
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
    batch = on_gpu(make_batch(8, 0.8, 1.0))
    sample(logits, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(logits, batch)
    logits.normal_()
    batch.seed.add_(5)
    graph.replay()
    assert torch.equal(tokens, sample(logits, batch))
