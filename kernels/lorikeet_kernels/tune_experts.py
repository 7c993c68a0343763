"""`python -m lorikeet_kernels.tune_experts`: time tiles of FP8 experts, print entries of a table.

For each model and number of tokens both GEMMs are timed apart over cold weights, candidates compiled by
threads first. A candidate whose results are not the rule's is told of and left out. --seconds bounds the
search. Lines that begin with "{" are entries as nvidia_h200_experts.json has them; put in what is faster than
the rule.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

import torch
from triton.compiler.errors import CompilationError

from lorikeet_kernels.benchmarking.bench_problem import MODELS, MoeModel
from lorikeet_kernels.benchmarking.expert_projections import expert_projection
from lorikeet_kernels.benchmarking.graph_timing import call_each, time_interleaved
from lorikeet_kernels.benchmarking.list_options import counts, names_among
from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.dense.gated_activation import SILU
from lorikeet_kernels.dense.quantize_rows import GROUP, quantize_rows
from lorikeet_kernels.experts.expert_blocks import expert_blocks
from lorikeet_kernels.experts.fp8_gemm import fp8_gemm
from lorikeet_kernels.experts.fp8_specialized import STAYING_COLUMNS
from lorikeet_kernels.experts.moe_experts import ExpertProjection
from lorikeet_kernels.launch.compile_ahead import compile_ahead
from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles, MoeShape, Weights, select_experts

Launch = Callable[[], None]
_KERNELS = ("decode", "prefill", "specialized")
_FEW = 12  # pairs an expert, up to which its bytes are all that counts
_SOME = 64  # up to which blocks of 128 pairs stay half empty
_SETS = 3  # of weights: what 16 tokens touch of one outweighs the L2
_MIDDLE = 8  # bits of a number of tokens between decode and prefill
_TOLERANCE = 1e-2  # of the Frobenius norm: orders of addition and roundings of e4m3's sums differ


def candidates(pairs_per_expert: float, columns: int) -> list[ExpertTiles]:
    """Tiles worth timing for a matrix of so many columns; those of one cut of pairs side by side."""
    steps = max(2, -(-columns // GROUP))
    tried: list[ExpertTiles] = []
    if pairs_per_expert <= _FEW:
        for block_n, stages, warps in (
            (64, 4, 4), (32, 4, 4), (32, 6, 2), (64, 6, 4), (64, 3, 4), (128, 3, 4), (128, 4, 8), (64, 4, 2),
        ):  # fmt: skip
            tried.append(ExpertTiles("decode", 16, block_n, GROUP, min(stages, steps), warps))
    if _FEW / 3 <= pairs_per_expert <= _SOME:
        for rows, block_n, stages, warps in (
            (32, 64, 4, 4),
            (32, 128, 3, 4),
            (64, 128, 4, 4),
            (64, 64, 4, 4),
        ):
            tried.append(ExpertTiles("prefill", rows, block_n, GROUP, min(stages, steps), warps))
    if pairs_per_expert > _SOME:
        for rows, block_n, stages, warps in (
            (128, 128, 4, 8), (64, 128, 4, 4), (128, 128, 3, 8), (64, 128, 3, 4), (64, 256, 3, 8),
            (128, 64, 4, 4),
        ):  # fmt: skip
            tried.append(ExpertTiles("prefill", rows, block_n, GROUP, min(stages, steps), warps))
    if pairs_per_expert > _FEW:
        own = ((192, 5), (192, 6), (128, 8)) if columns <= STAYING_COLUMNS else ((192, 4), (192, 5), (128, 6))
        for rows, stages in own:
            tried.append(ExpertTiles("specialized", rows, GROUP, GROUP, stages, rows // 16 + 4))
    return list(dict.fromkeys(tried))


@dataclass(frozen=True, slots=True)
class Gemm:
    """One of a layer's two GEMMs at a number of tokens, over several sets of weights."""

    model: MoeModel
    is_gate_up: bool
    ids: torch.Tensor
    projections: Sequence[ExpertProjection]
    tried: Sequence[ExpertTiles]
    rule: ExpertTiles

    def launches(self, tiles: ExpertTiles, out: torch.Tensor) -> list[Launch]:
        """One launch into `out` for each of the projections, whose weights differ."""
        scaling = _fp8(self.projections[0]).activations
        blocks = expert_blocks(self.ids, self.model.num_experts, tiles.block_rows)
        shape = self.ids.shape[:1] if self.is_gate_up else self.ids.shape
        generator = torch.Generator("cuda").manual_seed(1)
        columns = _fp8(self.projections[0]).shape[2]
        x = torch.randn((*shape, columns), device="cuda", generator=generator).to(torch.bfloat16)
        routed = None if self.is_gate_up else torch.full(self.ids.shape, 0.5, device="cuda")
        call = partial(
            fp8_gemm, quantize_rows(x, scaling), blocks=blocks, out=out, tiles=tiles, topk_weights=routed,
            activation=SILU if self.is_gate_up else None,
        )  # fmt: skip
        return [partial(_launch, call, projection) for projection in self.projections]

    def empty_out(self) -> torch.Tensor:
        """What the launches write."""
        width = self.model.inner if self.is_gate_up else self.model.hidden
        return torch.empty(*self.ids.shape, width, dtype=torch.bfloat16, device="cuda")


def _launch(call: Callable[..., object], projection: ExpertProjection) -> None:
    call(weight=_fp8(projection), row_order=projection.row_order)


def _fp8(projection: ExpertProjection) -> Fp8Weight:
    assert isinstance(projection.weight, Fp8Weight)
    return projection.weight


@dataclass(frozen=True, slots=True)
class Case:
    """A layer at a number of tokens."""

    model: MoeModel
    num_tokens: int
    shape: MoeShape
    gemms: tuple[Gemm, Gemm]


def cases(model: MoeModel, tokens: Sequence[int], storage: Weights, kernels: Sequence[str]) -> Iterator[Case]:
    """All of a model's, over the same weights; the rule's tiles are the first among what is tried."""
    weights = {
        is_gate_up: [expert_projection(model, storage, is_gate_up=is_gate_up) for _ in range(_SETS)]
        for is_gate_up in (True, False)
    }
    for num_tokens in tokens:
        generator = torch.Generator().manual_seed(num_tokens)
        scores = torch.rand(num_tokens, model.num_experts, generator=generator)
        ids = scores.topk(model.top_k, dim=1).indices.to(torch.int32).cuda()
        shape = MoeShape(storage, model.hidden, model.inner, model.num_experts, ids.numel())
        rule = select_experts(shape, "a card without a table")

        def gemm(own: ExpertTiles, *, is_gate_up: bool, ids: torch.Tensor = ids) -> Gemm:
            columns = model.hidden if is_gate_up else model.inner
            others = candidates(ids.numel() / model.num_experts, columns)
            tried = list(dict.fromkeys((own, *(tiles for tiles in others if tiles.kernel in kernels))))
            return Gemm(model, is_gate_up, ids, weights[is_gate_up], tried, own)

        both = gemm(rule.gate_up, is_gate_up=True), gemm(rule.down, is_gate_up=False)
        yield Case(model, num_tokens, shape, both)


def compile_all(of: Sequence[Case]) -> None:
    """Have every candidate in Triton's cache; what the compiler refuses is told of before it is timed."""

    def ask() -> None:
        for gemm in (gemm for case in of for gemm in case.gemms):
            call_each(gemm.launches(tiles, gemm.empty_out())[0] for tiles in gemm.tried)

    with suppress(RuntimeError, CompilationError):
        compile_ahead(ask, os.cpu_count() or 1)


def _compiles(gemm: Gemm, tiles: ExpertTiles, out: torch.Tensor) -> str:
    """Why it does not, or nothing."""
    try:
        gemm.launches(tiles, out)[0]()
        torch.cuda.synchronize()
    except (RuntimeError, CompilationError) as error:  # OutOfResources: too much shared memory or registers
        return str(error).splitlines()[0]
    return ""


def time_candidates(gemm: Gemm) -> dict[ExpertTiles, float]:
    """Microseconds of what compiles and gives the rule's results; the rest is told of."""
    expected = gemm.empty_out()
    gemm.launches(gemm.rule, expected)[0]()
    out = torch.empty_like(expected)
    ways: dict[ExpertTiles, list[Launch]] = {}
    for tiles in gemm.tried:
        out.fill_(float("nan"))
        refusal = _compiles(gemm, tiles, out)
        if not refusal:
            difference = float((out.float() - expected.float()).norm() / expected.float().norm())
            if not difference < _TOLERANCE:
                refusal = f"differs from the rule's by {difference:.3g}"
        if refusal:
            sys.stdout.write(f"  {tiles}: {refusal}\n")
        else:
            ways[tiles] = gemm.launches(tiles, out)
    times = time_interleaved({str(t): calls for t, calls in ways.items()}, rounds=5, sample_s=1e-3)
    return {tiles: times[str(tiles)] for tiles in ways}


def tune(case: Case, until: float) -> None:
    """Time one layer, and print what was found."""
    best: dict[int, dict[bool, tuple[float, ExpertTiles]]] = {}
    of_rule = 0.0
    for gemm in case.gemms:
        if time.monotonic() > until:
            sys.stdout.write("  out of time\n")
            return
        times = time_candidates(gemm)
        of_rule += times.get(gemm.rule, float("nan"))
        flop = 2.0 * gemm.ids.numel() * math.prod(_fp8(gemm.projections[0]).shape[1:])
        num_bytes = len(set(gemm.ids.flatten().tolist())) * math.prod(_fp8(gemm.projections[0]).shape[1:])
        for tiles in sorted(times, key=times.__getitem__):
            us = times[tiles]
            sys.stdout.write(
                f"  {case.model.name} T={case.num_tokens} {'gate_up' if gemm.is_gate_up else 'down':7} "
                f"{us:8.1f} us "
                f"{num_bytes / us * 1e-6:5.2f} TB/s {flop / us * 1e-6:5.0f} TFLOP/s  "
                f"{tiles.kernel} rows {tiles.block_rows} n {tiles.block_n} stages {tiles.stages} "
                f"warps {tiles.num_warps}{' (rule)' if tiles == gemm.rule else ''}\n"
            )
            kept = best.setdefault(tiles.block_rows, {})
            if gemm.is_gate_up not in kept or us < kept[gemm.is_gate_up][0]:
                kept[gemm.is_gate_up] = (us, tiles)
        sys.stdout.flush()
    whole = [kept for kept in best.values() if len(kept) == 2]
    if not whole:
        return
    chosen = min(whole, key=lambda kept: kept[True][0] + kept[False][0])
    entry = {
        "shape": asdict(case.shape),
        "gate_up": asdict(chosen[True][1]),
        "down": asdict(chosen[False][1]),
        "us": round(chosen[True][0] + chosen[False][0], 1),
    }
    served = select_experts(case.shape, device_name(case.gemms[0].ids))
    if served.ranged is not None and served.down.block_rows == chosen[False][1].block_rows:
        entry["ranged"] = asdict(served.ranged)  # not tried here
    sys.stdout.write(f"{json.dumps(entry)}\n  the rule's: {of_rule:.1f} us\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m lorikeet_kernels.tune_experts", description=__doc__)
    models = {model.name: model for model in MODELS}
    parser.add_argument(
        "--models",
        type=names_among(models),
        default="qwen3-30b-a3b,deepseek-v3-tp8",
        help=f"with commas, of {', '.join(models)}; default: %(default)s",
    )
    parser.add_argument("--tokens", type=counts, default="16,64,256,4096")
    parser.add_argument("--storage", default="fp8_block", choices=("fp8_block", "fp8_channel"))
    parser.add_argument(
        "--kernels", type=names_among(_KERNELS), default=",".join(_KERNELS), help="default: %(default)s"
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("tune_experts: needs a GPU, torch.cuda.is_available() is False here\n")
        return 2
    until = time.monotonic() + options.seconds
    found = [
        case
        for name in options.models
        for case in cases(models[name], options.tokens, options.storage, options.kernels)
    ]
    compile_all(found)
    for case in sorted(found, key=lambda case: _telling(case.num_tokens)):
        if time.monotonic() < until:
            tune(case, until)
    return 0


def _telling(num_tokens: int) -> int:
    """Both ends first, what lies between last, should time run out."""
    return -abs(num_tokens.bit_length() - _MIDDLE)


if __name__ == "__main__":
    sys.exit(main())
