"""`python -m lorikeet_kernels.tune_experts`: time tiles of FP8 experts, print entries of a table.

For each model and number of tokens both GEMMs are timed apart over cold weights, candidates compiled by
threads first; --seconds bounds all of it. Lines that begin with "{" are entries as nvidia_h200_experts.json
has them; put in what is faster than the rule.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import torch

from lorikeet_kernels.benchmarking.bench_problem import MODELS, MoeModel
from lorikeet_kernels.benchmarking.expert_projections import expert_projection
from lorikeet_kernels.benchmarking.graph_timing import time_interleaved
from lorikeet_kernels.benchmarking.list_options import counts, names_among
from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.dense.gated_activation import SILU
from lorikeet_kernels.dense.quantize_rows import quantize_rows
from lorikeet_kernels.experts.expert_blocks import expert_blocks
from lorikeet_kernels.experts.fp8_gemm import fp8_gemm
from lorikeet_kernels.experts.moe_experts import ExpertProjection
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles, MoeShape, Weights, select_experts

Launch = Callable[[], None]
_FEW = 12  # pairs an expert, up to which its bytes are all that counts


def candidates(pairs_per_expert: float) -> Iterator[ExpertTiles]:
    """Tiles worth timing, the likeliest first; those of one cut of pairs side by side."""
    if pairs_per_expert <= _FEW:
        for block_n, stages, warps in (
            (64, 4, 4), (64, 3, 4), (32, 4, 4), (128, 3, 4), (32, 6, 2), (64, 4, 2), (128, 4, 8), (64, 6, 4),
            (32, 4, 2), (64, 2, 4), (128, 2, 4),
        ):  # fmt: skip
            yield ExpertTiles("decode", 16, block_n, 128, stages, warps)
        return
    for rows, block_n, stages, warps, registers in (
        (128, 128, 4, 8, None), (64, 128, 4, 4, None), (64, 128, 3, 4, 168), (128, 128, 3, 8, None),
        (128, 128, 5, 8, None), (64, 128, 5, 4, None), (64, 64, 4, 4, None), (128, 64, 4, 4, None),
        (128, 64, 3, 8, 128), (64, 256, 3, 8, None),
    ):  # fmt: skip
        yield ExpertTiles("prefill", rows, block_n, 128, stages, warps, max_registers=registers)
    for rows, block_n, stages, warps in (
        (128, 128, 6, 8), (128, 128, 4, 8), (64, 128, 4, 4), (64, 128, 8, 4), (128, 64, 4, 8),
    ):  # fmt: skip
        yield ExpertTiles("pipelined", rows, block_n, 128, stages, warps)


def launches(
    projections: Sequence[ExpertProjection], ids: torch.Tensor, tiles: ExpertTiles, *, is_gate_up: bool
) -> list[Launch]:
    """One launch for each of the projections, whose weights differ."""
    weight = projections[0].weight
    assert isinstance(weight, Fp8Weight)
    num_experts, rows, columns = weight.shape
    blocks = expert_blocks(ids, num_experts, tiles.block_rows)
    shape = (ids.shape[0], columns) if is_gate_up else (*ids.shape, columns)
    x = quantize_rows(torch.randn(shape, device="cuda").to(torch.bfloat16), weight.activations)
    out = torch.empty(*ids.shape, rows // 2 if is_gate_up else rows, dtype=torch.bfloat16, device="cuda")
    routed = None if is_gate_up else torch.rand(ids.shape, device="cuda")

    def launch(projection: ExpertProjection) -> None:
        assert isinstance(projection.weight, Fp8Weight)
        fp8_gemm(
            x, projection.weight, blocks, out, tiles, topk_weights=routed,
            activation=SILU if is_gate_up else None, row_order=projection.row_order,
        )  # fmt: skip

    return [lambda p=projection: launch(p) for projection in projections]


def _compiles(launch: Launch) -> str:
    """Why it does not, or nothing."""
    torch.cuda.set_device(0)
    torch.cuda.synchronize()  # a thread has no context before its first call
    try:
        launch()
    except RuntimeError as error:  # Triton's OutOfResources: too much shared memory or too many registers
        return str(error).splitlines()[0]
    return ""


def tune(
    model: MoeModel, num_tokens: int, storage: Weights, until: float, *, only_compiles: bool = False
) -> None:
    """Time one model at one number of tokens, and print what was found."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, model.num_experts, generator=generator)
    ids = scores.topk(model.top_k, dim=1).indices.to(torch.int32).cuda()
    shape = MoeShape(storage, model.hidden, model.inner, model.num_experts, ids.numel())
    rule = select_experts(shape, "a card without a table")
    best: dict[int, dict[bool, tuple[float, ExpertTiles]]] = {}
    for is_gate_up in (True, False):
        projections = [
            expert_projection(model, storage, is_gate_up=is_gate_up)
            for _ in range(4 if num_tokens < 256 else 2)
        ]
        own = rule.gate_up if is_gate_up else rule.down
        tried = list(dict.fromkeys((own, *candidates(ids.numel() / model.num_experts))))
        made = {tiles: launches(projections, ids, tiles, is_gate_up=is_gate_up) for tiles in tried}
        with ThreadPoolExecutor(12) as threads:
            refusals = list(threads.map(_compiles, [made[tiles][0] for tiles in tried]))
        for tiles, refusal in zip(tried, refusals, strict=True):
            if refusal:
                sys.stdout.write(f"  {tiles}: {refusal}\n")
                del made[tiles]
        if only_compiles:
            continue
        if time.monotonic() > until:
            sys.stdout.write("  out of time\n")
            return
        times = time_interleaved({str(t): calls for t, calls in made.items()}, rounds=5, sample_s=2e-3)
        for tiles in sorted(made, key=lambda t: times[str(t)]):
            us = times[str(tiles)]
            mark = " (rule)" if tiles == own else ""
            sys.stdout.write(
                f"  {model.name} T={num_tokens} {'gate_up' if is_gate_up else 'down':7} {us:8.1f} us  "
                f"{tiles.kernel} rows {tiles.block_rows} n {tiles.block_n} stages {tiles.stages} "
                f"warps {tiles.num_warps} registers {tiles.max_registers}{mark}\n"
            )
            kept = best.setdefault(tiles.block_rows, {})
            if is_gate_up not in kept or us < kept[is_gate_up][0]:
                kept[is_gate_up] = (us, tiles)
        sys.stdout.flush()
    if only_compiles:
        return
    both = [kept for kept in best.values() if len(kept) == 2]
    chosen = min(both, key=lambda kept: kept[True][0] + kept[False][0])
    entry = {
        "shape": asdict(shape),
        "gate_up": asdict(replace(chosen[True][1], splits=1)),
        "down": asdict(chosen[False][1]),
        "us": round(chosen[True][0] + chosen[False][0], 1),
    }
    sys.stdout.write(json.dumps(entry) + "\n")


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
    parser.add_argument("--tokens", type=counts, default="16,4096")
    parser.add_argument("--storage", default="fp8_block", choices=("fp8_block", "fp8_channel"))
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--only-compile", action="store_true", help="into Triton's cache, for a later run")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("tune_experts: needs a GPU, torch.cuda.is_available() is False here\n")
        return 2
    until = time.monotonic() + options.seconds
    for name in options.models:
        for num_tokens in options.tokens:
            if time.monotonic() < until:
                tune(models[name], num_tokens, options.storage, until, only_compiles=options.only_compile)
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
