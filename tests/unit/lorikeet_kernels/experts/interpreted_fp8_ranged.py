"""The grouped GEMM by ranges in Triton's interpreter, run by test_fp8_interpreted.py.

All its programs run at once, one of them slower than the others. Values, scales and routed weights have so
few bits that every sum is exact: what comes out has the reference's bits. In float16, which the interpreter
rounds as devices do.
"""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ring_stand_in
import threads_stand_in
import torch
from threads_stand_in import Slowness

ring_stand_in.install()

from lorikeet_kernels.dense.fp8_weight import Fp8Weight, dequantize_fp8  # noqa: E402 (Gluon stands in by now)
from lorikeet_kernels.dense.quantize_rows import E4M3, GROUP, ActivationScaling, QuantizedRows  # noqa: E402
from lorikeet_kernels.experts import fp8_ranged_down, fp8_ranged_items, fp8_ranged_warps, fp8_warps  # noqa: E402
from lorikeet_kernels.experts.expert_blocks import expert_blocks_reference  # noqa: E402
from lorikeet_kernels.experts.moe_sum import SharedRows, moe_sum_reference  # noqa: E402
from lorikeet_kernels.launch import grid_dependency  # noqa: E402
from lorikeet_kernels.tiling.expert_tiles import RangedTiles  # noqa: E402

DTYPE = torch.float16
GENERATOR = torch.Generator().manual_seed(1)


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    """From `low` to before `high`, float32."""
    return torch.randint(low, high, shape, generator=GENERATOR).float()


def assign_experts(pairs: Sequence[int], top_k: int) -> torch.Tensor:
    """Experts of tokens, distinct for each, so that expert e has pairs[e] pairs: [tokens, top_k] int32."""
    experts = torch.arange(len(pairs), dtype=torch.int32).repeat_interleave(torch.tensor(pairs))
    tokens = len(experts) // top_k
    assert tokens * top_k == len(experts)
    assert max(pairs) <= tokens
    return experts.view(top_k, tokens).T[torch.randperm(tokens, generator=GENERATOR)].contiguous()


@dataclass(frozen=True)
class Cut:
    """How a launch divides the work: on `programs` processors, by ranges."""

    programs: int
    range_tiles: int
    lag: int
    buffers: int
    slow: Slowness
    stages: int = 4
    unused: int = 513
    """Blocks that the host counts on beyond those that there are: more than programs count at once."""


@contextmanager
def guarding_rows(out: torch.Tensor, ranges: int) -> Generator[None]:
    """Rows that the host makes like `out` have a guard behind them, as long as those of all ranges.

    Raises:
        AssertionError: someone has written there.
    """
    guards = list[torch.Tensor]()
    new_empty = out.new_empty

    def new_guarded(shape: Sequence[int], **options: Any) -> torch.Tensor:
        if options:  # the interpreter's own
            return new_empty(shape, **options)
        count, *rest = shape
        both = new_empty((count + ranges, *rest))
        guards.append(both[count:])
        return both[:count]

    with mock.patch.object(out, "new_empty", new_guarded):
        yield
    (guard,) = guards
    assert guard.isnan().all(), "rows were written where none are"


def check(
    pairs: Sequence[int], top_k: int, ranges: int, in_features: int, cut: Cut, *, has_shared: bool = False
) -> None:
    """Experts with so many pairs, a matrix of so many ranges."""
    ids = assign_experts(pairs, top_k)
    num_tokens, num_experts, out_features = len(ids), len(pairs), ranges * cut.range_tiles * GROUP
    groups = in_features // GROUP
    rows = QuantizedRows(
        integers(-4, 5, num_tokens, top_k, in_features).to(E4M3),
        2.0 ** integers(-2, 1, num_tokens * top_k, groups),
    )
    weight = Fp8Weight(
        integers(-8, 9, num_experts, out_features, in_features).to(E4M3),
        2.0 ** integers(-2, 1, num_experts, out_features // GROUP, groups),
        ActivationScaling("group"),
    )
    topk_weights = integers(1, 16, num_tokens, top_k) / 16
    shared = integers(-64, 65, num_tokens, out_features).to(DTYPE) if has_shared else None
    blocks = expert_blocks_reference(ids, num_experts, fp8_ranged_down.BLOCK_ROWS)
    used = blocks.blocks[blocks.blocks[:, 1] > 0]
    blocks = replace(blocks, blocks=torch.cat((used, used.new_zeros((cut.unused, 4)))))
    out = torch.full((num_tokens, out_features), float("nan"), dtype=DTYPE)
    processors = SimpleNamespace(multi_processor_count=cut.programs)
    asked = mock.patch.object(torch.cuda, "get_device_properties", return_value=processors)
    tiles = RangedTiles(cut.range_tiles * GROUP, cut.stages, cut.lag, cut.buffers)
    marks = fp8_ranged_down.empty_marks(weight, tiles)
    with asked, threads_stand_in.slowing(cut.slow), guarding_rows(out, ranges):
        fp8_ranged_down.fp8_ranged_down(rows, weight, blocks, out, tiles, topk_weights, marks, shared=shared)
    scales = rows.scales.repeat_interleave(GROUP, dim=1).view(rows.values.shape)
    x = rows.values.double() * scales
    matrices = dequantize_fp8(weight, torch.float64)
    results = [matrices[e] @ row for e, row in zip(ids.flatten().tolist(), x.flatten(0, 1), strict=True)]
    pair_rows = torch.stack(results).view(num_tokens, top_k, out_features) * topk_weights.unsqueeze(-1)
    expected = moe_sum_reference(pair_rows.to(DTYPE), None if shared is None else SharedRows(shared))
    assert torch.equal(out, expected), (out != expected).nonzero().tolist()[:8]


SLOW_COPIES, SLOW_PRODUCTS = Slowness(0, "copies", 0.2), Slowness(0, "products", 0.03)
LATE_COPIES = Slowness(0, "copies", 0.02)
UNEVEN = (200, 0, 140, 70, 10)
"""Five blocks: one that is full and one that has 8 pairs, of one expert; of 3, 2 and 1 warpgroups."""


def check_staying() -> None:
    """Blocks that stay; buffers used anew, one more than the lag, then two; one program alone.

    Of the second launch's blocks, and of the third's, the host knows that they stay.
    """
    check(UNEVEN, 2, 5, 128, Cut(3, 1, lag=2, buffers=3, slow=SLOW_COPIES))
    check(UNEVEN, 2, 4, 256, Cut(4, 1, 1, 3, SLOW_PRODUCTS, stages=3, unused=3), has_shared=True)
    check((37, 0, 37), 2, 4, 128, Cut(1, 2, lag=2, buffers=3, slow=SLOW_COPIES, unused=0))


def check_many() -> None:
    """Three blocks a program and more, not as many for each, others in each range; a ring of two blocks.

    Also more ranges than a block has parts, with one that has none of them, and fewer.
    """
    check(UNEVEN, 2, 4, 256, Cut(2, 1, lag=1, buffers=2, slow=SLOW_COPIES), has_shared=True)
    check((13,) * 8, 1, 4, 128, Cut(3, 1, lag=2, buffers=4, slow=SLOW_PRODUCTS))
    check((13,) * 8, 8, 4, 128, Cut(3, 2, lag=2, buffers=3, slow=SLOW_PRODUCTS))
    check((13,) * 8, 1, 4, 128, Cut(2, 1, lag=1, buffers=2, slow=SLOW_COPIES, stages=8))
    check((13,) * 8, 2, 6, 128, Cut(3, 1, lag=1, buffers=2, slow=SLOW_COPIES, unused=0))
    check((3,) * 12, 2, 2, 128, Cut(5, 1, lag=1, buffers=2, slow=SLOW_PRODUCTS))


def check_idle() -> None:
    """Programs without blocks, without tokens to sum, without either; more buffers than ranges."""
    check((13, 13), 2, 4, 128, Cut(5, 2, lag=1, buffers=2, slow=SLOW_COPIES), has_shared=True)
    check((0, 150, 0), 1, 3, 256, Cut(4, 1, lag=2, buffers=5, slow=SLOW_PRODUCTS))


def check_edges() -> None:
    """In short: a program without items; as many blocks as stay, which the host knows; one more."""
    check((9,), 1, 4, 128, Cut(3, 1, lag=1, buffers=2, slow=LATE_COPIES, unused=1))
    check((5,) * 4, 1, 3, 128, Cut(2, 1, lag=1, buffers=2, slow=LATE_COPIES, unused=0))
    check((5,) * 5, 1, 3, 128, Cut(2, 1, lag=1, buffers=2, slow=LATE_COPIES, unused=0))


CASES: dict[str, Callable[[], None]] = {
    "staying": check_staying,
    "edges": check_edges,
    "many": check_many,
    "idle": check_idle,
}


if __name__ == "__main__":
    for module in (fp8_ranged_down, fp8_ranged_items, fp8_ranged_warps, fp8_warps, grid_dependency):
        ring_stand_in.attach(module)
    threads_stand_in.let_programs_meet(fp8_ranged_down._fp8_ranged_down_kernel)
    torch.use_deterministic_algorithms(mode=True)  # makes new tensors, the rows among them, full of NaN
    CASES[sys.argv[1]]()
