"""Sampling and log-probabilities."""

import math
from dataclasses import replace

import pytest
import torch

from lorikeet_kernels.sampling.logprobs import token_logprobs
from lorikeet_kernels.sampling.sampling import NO_TOKEN, SamplingBatch, exponential_noise, sample
from tests.support.sampling_reference import kept


def make_batch(
    rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float | None = None,
    seeds: list[int] | None = None,
    positions: list[int] | None = None,
) -> SamplingBatch:
    """Rows with equal settings; each at its own position unless told otherwise."""
    return SamplingBatch(
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k),
        top_p=torch.full((rows,), top_p),
        seed=torch.tensor(seeds or [0] * rows),
        position=torch.tensor(positions or list(range(rows))),
        all_greedy=temperature == 0,
        any_cut=top_k > 0 or top_p < 1,
        min_p=None if min_p is None else torch.full((rows,), min_p),
    )


def frequencies(logits: torch.Tensor, draws: int, **settings: float) -> torch.Tensor:
    """Shares of each token over many positions."""
    batch = make_batch(draws, **settings)  # pyright: ignore[reportArgumentType]
    tokens = sample(logits.expand(draws, -1), batch)
    return torch.bincount(tokens, minlength=logits.shape[-1]) / draws


def test_greedy_takes_the_first_of_equals() -> None:
    """Ties go to the lower id."""
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, 1.0, 1.0]])
    assert sample(logits, make_batch(2, temperature=0.0)).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_has_no_token(temperature: float, top_k: int, bad: float) -> None:
    """One bad logit is enough; the rows beside it are what they are without it. -inf only masks a token."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(3))
    logits[2, :20] = -math.inf
    batch = make_batch(3, temperature=temperature, top_k=top_k)
    clean = sample(logits, batch)
    assert int(clean[2]) >= 20
    logits[1, 17] = bad
    assert sample(logits, batch).tolist() == [int(clean[0]), NO_TOKEN, int(clean[2])]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    """Chi-square over 40,000 positions stays below its 99.99 % point for 7 degrees of freedom."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 0.5, -2.0, 1.5])
    expected = torch.softmax(logits / temperature, dim=-1)
    seen = frequencies(logits, 40_000, temperature=temperature)
    assert 40_000 * float(((seen - expected) ** 2 / expected).sum()) < 29.9


def test_seeds_are_independent() -> None:
    """The same position under many seeds is as random as many positions under one."""
    logits = torch.zeros(16).expand(32_000, -1)
    batch = make_batch(32_000, seeds=[s * 2**32 + 5 for s in range(32_000)], positions=[9] * 32_000)
    seen = torch.bincount(sample(logits, batch), minlength=16) / 32_000
    assert 32_000 * 16 * float(((seen - 1 / 16) ** 2).sum()) < 44.3  # 99.99 %, 15 degrees of freedom


def test_noise_does_not_repeat_along_a_sequence() -> None:
    """Neighbouring positions, seeds and tokens share nothing visible."""
    noise = exponential_noise(torch.tensor([1, 1, 2]), torch.tensor([5, 6, 5]), 4096)
    correlation = torch.corrcoef(noise)
    assert float((correlation - torch.eye(3)).abs().max()) < 0.06
    assert abs(float(torch.corrcoef(torch.stack((noise[0, 1:], noise[0, :-1])))[0, 1])) < 0.06
    assert noise.mean() == pytest.approx(1.0, abs=0.05)
    assert float(noise.min()) > 0


def test_top_k_and_top_p_cut() -> None:
    """Only the kept tokens appear, in their renormalised shares; top_k cuts first."""
    logits = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]))
    assert (frequencies(logits, 5000, top_k=2) > 0).tolist() == [True, True, False, False, False]
    assert (frequencies(logits, 5000, top_p=0.69) > 0).tolist() == [True, True, False, False, False]
    assert (frequencies(logits, 5000, top_p=0.71) > 0).tolist() == [True, True, True, False, False]
    # Of the three kept by top_k the first two reach 0.8.
    assert (frequencies(logits, 5000, top_k=3, top_p=0.8) > 0).tolist() == [True, True, False, False, False]
    assert frequencies(logits, 20_000, top_k=2)[0] == pytest.approx(4 / 7, abs=0.015)


@pytest.mark.parametrize("min_p", [None, 0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (6, 0.8)])
def test_what_is_kept_is_the_loops(min_p: float | None, top_k: int, top_p: float) -> None:
    """min_p, then top_k, then top_p of what is left, in its own shares."""
    logits = torch.randn(30, generator=torch.Generator().manual_seed(7)) * 2
    expected = kept(logits.tolist(), 1.4, min_p=min_p or 0.0, top_k=top_k, top_p=top_p)
    settings = {"temperature": 1.4, "top_k": top_k, "top_p": top_p}
    seen = frequencies(logits, 20_000, **settings if min_p is None else settings | {"min_p": min_p})
    assert set(seen.nonzero().flatten().tolist()) <= set(expected)
    for token, share in expected.items():
        assert float(seen[token]) == pytest.approx(share, abs=0.02)


def test_a_min_p_of_nothing_changes_nothing() -> None:
    """Rows beside one that has it draw what they draw without."""
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(3))
    for top_k in (0, 20):
        plain = make_batch(50, top_k=top_k)
        assert torch.equal(sample(logits, plain), sample(logits, replace(plain, min_p=torch.zeros(50))))


def test_top_p_smaller_than_any_keeps_the_best() -> None:
    """The set is never empty, and top_k beyond the vocabulary keeps all."""
    logits = torch.zeros(5)
    assert frequencies(logits, 200, top_p=1e-9)[0] == 1
    assert (frequencies(logits, 2000, top_k=99) > 0).all()


@pytest.mark.parametrize("temperature", [1e-30, 1e-6])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    """No overflow on the way."""
    logits = torch.randn(9, 300) * 50
    assert torch.equal(sample(logits, make_batch(9, temperature=temperature)), logits.argmax(-1))


def test_batch_does_not_matter() -> None:
    """A row draws the same token alone, beside greedy rows, and beside rows with cuts."""
    logits = torch.randn(6, 513)
    batch = make_batch(6, seeds=[3, -4, 2**62, 3, 8, 9])
    mixed = replace(
        batch,
        temperature=torch.tensor([1.0, 0.0, 0.7, 1.0, 0.0, 2.0]),
        top_k=torch.tensor([0, 0, 5, 0, 0, 0]),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.3, 1.0, 1.0]),
        any_cut=True,
    )
    together = sample(logits, mixed)
    for row in range(6):
        part = slice(row, row + 1)
        alone = SamplingBatch(
            mixed.temperature[part],
            mixed.top_k[part],
            mixed.top_p[part],
            mixed.seed[part],
            mixed.position[part],
            all_greedy=False,
            any_cut=bool(mixed.top_k[row] > 0 or mixed.top_p[row] < 1),
        )
        assert sample(logits[part], alone)[0] == together[row]


def test_token_logprobs() -> None:
    """Against log(softmax) by hand, up to the whole vocabulary."""
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 5.0]])
    chosen, ids, values = token_logprobs(logits, torch.tensor([0, 2]), 3)
    for row, token in ((0, 0), (1, 2)):
        total = math.log(sum(math.exp(v) for v in logits[row].tolist()))
        assert float(chosen[row]) == pytest.approx(float(logits[row, token]) - total, abs=1e-6)
    assert ids[0].tolist() == [1, 2, 0]
    assert sorted(ids[1].tolist()) == [0, 1, 2]
    assert values.exp().sum(-1).tolist() == pytest.approx([1.0, 1.0])
    with pytest.raises(ValueError, match="num_top 4"):
        token_logprobs(logits, torch.tensor([0, 2]), 4)


def test_misfit_is_refused() -> None:
    """Parameters of another batch."""
    with pytest.raises(ValueError, match="do not fit logits"):
        sample(torch.zeros(3, 5), make_batch(2))
