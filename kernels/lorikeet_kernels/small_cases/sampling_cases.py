"""Small cases of the room `sampling`: a few rows over a vocabulary that ends within a block."""

import torch

from lorikeet_kernels.sampling.penalties import Penalties, penalize_reference, penalize_rows
from lorikeet_kernels.sampling.pending_tokens import pending_tokens_reference, read_pending
from lorikeet_kernels.sampling.sample_rows import sample_rows
from lorikeet_kernels.sampling.sampling import SamplingBatch, sample_reference
from lorikeet_kernels.sampling.token_bitmask import (
    num_mask_words,
    token_bitmask_reference,
    token_bitmask_rows,
)
from lorikeet_kernels.sampling.top_k_bounds import top_k_bounds, top_k_bounds_reference
from lorikeet_kernels.small_cases.small_case import SmallCase, SmallProblem, moved

ROWS, VOCAB, CHUNKS = 10, 1500, 2


def _logits(seed: int) -> torch.Tensor:
    """Rows with ties, a NaN, an infinity and a mask among them."""
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    logits[1] = logits[1].round()
    logits[2, 7] = float("nan")
    logits[3, 40:] = float("-inf")
    logits[4, 1400] = float("inf")
    return logits


def _pending_tokens(dtype: torch.dtype) -> SmallProblem:
    """More ids than a program has, a place without a token."""
    del dtype
    sampled = torch.arange(1000, 1065)
    sampled[3] = -1
    places = torch.arange(600)
    ids = torch.where(places % 3 == 0, -1 - places % 65, places)
    return SmallProblem(
        (pending_tokens_reference(ids, sampled),),
        lambda device: (read_pending(*moved((ids, sampled), device)),),
    )


def _token_bitmask(dtype: torch.dtype) -> SmallProblem:
    """Several programs a row, a last word in part, rows in any order, logits in wider rows."""
    generator = torch.Generator().manual_seed(1)
    vocab = 9001
    logits = torch.randn(5, vocab + 7, generator=generator).to(dtype)
    masks = torch.randint(-(2**31), 2**31, (3, num_mask_words(vocab)), generator=generator, dtype=torch.int32)
    masks[1], rows = 0, torch.tensor([4, 1, 2])
    expected = logits.clone()
    token_bitmask_reference(expected[:, :vocab], masks, rows)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        out, words, which = moved((logits, masks, rows), device)
        token_bitmask_rows(out[:, :vocab], words, which)
        return (out,)

    return SmallProblem((expected,), launch, tolerance=0.0)


def _penalties(dtype: torch.dtype) -> SmallProblem:
    """Prompt, output, both and neither; masked tokens; rows in any order."""
    del dtype
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 3001, generator=generator) * 4
    logits[:, 9] = float("-inf")
    counts = torch.randint(0, 9, (7, 3001), generator=generator, dtype=torch.int32)
    penalties = Penalties(
        counts, torch.tensor([3, 0, 4]), torch.tensor([6, 2, 0]), torch.tensor([1.3, 0.7, 1.0]),
        torch.tensor([0.5, -2.0, 0.0]), torch.tensor([0.25, 1.5, -2.0]),
    )  # fmt: skip
    expected = logits.clone()
    penalize_reference(expected, penalties)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        out, given = moved((logits, penalties), device)
        penalize_rows(out, given)
        return (out,)

    return SmallProblem((expected,), launch, tolerance=1e-5)


def _top_k_bounds(dtype: torch.dtype) -> SmallProblem:
    """Ties over chunks, every size of set, rows that keep all."""
    logits = _logits(3).to(dtype)
    logits[2, 7] = 0.0  # a row with NaN gets any bound
    top_k = torch.tensor([0, 40, 1, 300, 2, VOCAB - 1, VOCAB, VOCAB + 5, 7, 700])
    expected = top_k_bounds_reference(logits, top_k)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        return top_k_bounds(*moved((logits, top_k), device), num_chunks=CHUNKS)

    return SmallProblem(expected, launch, tolerance=0.0)


def _sample(num_rounds: int, *, has_all_cuts: bool) -> SmallProblem:
    """Greedy, drawn and cut rows in one batch; another order of additions may move one set's end."""
    logits = _logits(4)
    positions = torch.arange(ROWS) * 77
    batch = SamplingBatch(
        temperature=torch.tensor([1.0, 1.0, 1.0, 0.7, 0.0, 1.5, 1.0, 2.0, 1e-6, 1.0]),
        top_k=torch.tensor([3, 40, 5, 100, 2, 0, 1499, 1, 7, 0]) if has_all_cuts else positions * 0,
        top_p=torch.tensor([1.0, 0.5, 0.9, 0.3, 0.1, 0.8, 0.05, 0.7, 0.5, 1.0]),
        seed=torch.tensor([5, -1, 2**62, 7, 7, 7, 0, 1, 2, -(2**40)]),
        position=positions,
        all_greedy=False,
        any_cut=True,
        min_p=torch.tensor([0.0, 0.05, 0.1, 0.02, 0.9, 0.2, 0.0, 0.01, 0.5, 1.0]) if has_all_cuts else None,
    )

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        rows, b = moved((logits, batch), device)
        tokens = sample_rows(
            rows, b.temperature, b.top_p, b.seed, b.position, all_greedy=False, any_top_p=True,
            top_k=b.top_k if has_all_cuts else None, min_p=b.min_p, num_rounds=num_rounds, num_chunks=CHUNKS,
        )  # fmt: skip
        return (tokens,)

    return SmallProblem((sample_reference(logits, batch),), launch, tolerance=1.0)


_TOP_K = tuple(f"sampling.top_k_bounds._{name}_kernel" for name in ("count_digits", "digit", "end"))
_DRAWS = tuple(f"sampling.sample_rows._{name}_kernel" for name in ("largest", "draw", "first", "finish"))
_ROUNDS = tuple(f"sampling.sample_rows._{name}_kernel" for name in ("mass", "next"))

CASES = (
    SmallCase("pending_tokens", ("sampling.pending_tokens._pending_tokens_kernel",), _pending_tokens),
    SmallCase("token_bitmask", ("sampling.token_bitmask._token_bitmask_kernel",), _token_bitmask),
    SmallCase("penalties", ("sampling.penalties._penalize_kernel",), _penalties),
    SmallCase("top_k_bounds", _TOP_K, _top_k_bounds),
    SmallCase("sample_top_p", (*_DRAWS, *_ROUNDS), lambda _: _sample(2, has_all_cuts=False)),
    SmallCase("sample_all_cuts", (*_TOP_K, *_DRAWS), lambda _: _sample(0, has_all_cuts=True)),
)
