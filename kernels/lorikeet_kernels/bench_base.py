"""`python -m lorikeet_kernels.bench_base`: the base ops on this GPU, with the share of each one's floor.

Floors count the bytes that must move at FLOOR_BYTES_PER_S, or the multiplications at FLOOR_FLOP_PER_S where
those take longer. Every figure is a median over CUDA graphs of cold input sets.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from lorikeet_kernels.attention.attention_inputs import attention_inputs
from lorikeet_kernels.attention.attention_metadata import AttentionMetadata
from lorikeet_kernels.attention.paged_attention import paged_attention
from lorikeet_kernels.benchmarking.bench_problem import MODELS, MoeModel
from lorikeet_kernels.benchmarking.expert_projections import WEIGHT_BYTES, expert_projection, fp8_weight
from lorikeet_kernels.benchmarking.few_rows_points import SIZES, few_rows_point, with_rows
from lorikeet_kernels.benchmarking.fp8_points import (
    block_downs,
    block_product_ways,
    down_and_sum_ways,
    layer_part_points,
)
from lorikeet_kernels.benchmarking.graph_timing import call_each, time_interleaved
from lorikeet_kernels.benchmarking.latent_points import Point, around_points, attention_points, prompt_points
from lorikeet_kernels.benchmarking.list_options import names_among
from lorikeet_kernels.benchmarking.router_ways import router_ways
from lorikeet_kernels.dense.fp8_linear import fp8_linear
from lorikeet_kernels.dense.gated_activation import SILU, GatedActivation
from lorikeet_kernels.dense.rms_norm import rms_norm
from lorikeet_kernels.experts.expert_blocks import expert_blocks
from lorikeet_kernels.experts.moe_experts import moe_experts
from lorikeet_kernels.experts.routing import route_softmax
from lorikeet_kernels.launch.compile_ahead import compile_ahead
from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.sampling.penalties import Penalties, penalize
from lorikeet_kernels.sampling.sampling import SamplingBatch, sample
from lorikeet_kernels.sampling.token_bitmask import num_mask_words, token_bitmask
from lorikeet_kernels.tiling.expert_tiles import Weights
from lorikeet_kernels.tiling.few_rows_tiles import MAX_FEW_ROWS, rule, select_few_rows

FLOOR_BYTES_PER_S = 4.3e12
FLOOR_FLOP_PER_S = 790e12
FLOOR_FP8_FLOP_PER_S = 1580e12
BF16 = torch.bfloat16
FP8_LINEARS = {"llama-3.3-70b o": (8192, 8192), "qwen3-30b-a3b qkv": (5120, 2048)}
GPT_OSS_ACTIVATION = GatedActivation(1.702, 7.0, 1.0)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: microseconds, the floor in microseconds, and TFLOP/s where arithmetic bounds it."""

    name: str
    value: float
    unit: str
    floor: float
    tflops: float | None = None

    def __str__(self) -> str:
        rate = "" if self.tflops is None else f" {self.tflops:6.0f} TFLOP/s"
        share = f"floor {self.floor:8.1f} {self.floor / self.value:5.0%}"
        return f"{self.name:44} {self.value:9.1f} {self.unit} {share}{rate}"


def _row(
    name: str,
    calls: Sequence[Callable[[], object]],
    num_bytes: float,
    flop: float = 0.0,
    peak: float = FLOOR_FLOP_PER_S,
) -> Row:
    us = time_interleaved({name: [_silent(call) for call in calls]})[name]
    floor = max(num_bytes / FLOOR_BYTES_PER_S, flop / peak) * 1e6
    return Row(name, round(us, 2), "us", round(floor, 2), round(flop / us * 1e-6, 1) if flop else None)


def _silent(call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        call()

    return run


def bench_moe(model: MoeModel, tokens: Sequence[int], storage: Weights) -> Iterator[Row]:
    """The whole layer: routing of given logits, cut, both GEMMs with all that is fused, sum."""
    activation = GPT_OSS_ACTIVATION if model.num_a == 1 else SILU
    layers = [
        (
            expert_projection(model, storage, is_gate_up=True),
            expert_projection(model, storage, is_gate_up=False),
        )
        for _ in range(3 if storage == "bf16" else 6)
    ]
    weight_bytes = 3 * model.inner * model.hidden * WEIGHT_BYTES[storage]
    peak = FLOOR_FP8_FLOP_PER_S if storage.startswith("fp8") else FLOOR_FLOP_PER_S
    sets = {n: 12 if n <= 4 else 6 if n <= 512 else 2 for n in tokens}
    logits = {
        n: [torch.randn(n, model.num_experts, device="cuda").to(BF16) for _ in range(sets[n])] for n in tokens
    }
    inputs = {
        n: [torch.randn(n, model.hidden, device="cuda").to(BF16) for _ in range(sets[n])] for n in tokens
    }

    def run(num_tokens: int, index: int) -> object:
        weights, ids = route_softmax(logits[num_tokens][index], model.top_k, renormalize=True)
        gate_up, down = layers[index % len(layers)]
        return moe_experts(inputs[num_tokens][index], weights, ids, gate_up, down, activation)

    compile_ahead(lambda: call_each(partial(run, n, 0) for n in tokens), os.cpu_count() or 1)
    for num_tokens in tokens:
        chosen = [route_softmax(one, model.top_k, renormalize=True)[1] for one in logits[num_tokens]]
        touched = statistics.mean(len(set(ids.flatten().tolist())) for ids in chosen)
        yield _row(
            f"moe {storage} {model.name} T={num_tokens}",
            [lambda n=num_tokens, i=i: run(n, i) for i in range(sets[num_tokens])],
            touched * weight_bytes + 4 * num_tokens * model.hidden,
            6.0 * num_tokens * model.top_k * model.hidden * model.inner,
            peak,
        )


def bench_fp8_linear() -> Iterator[Row]:
    """Dense projections in FP8, the quantising of their input included."""
    points: list[Point] = []
    for name, (rows, columns) in FP8_LINEARS.items():
        for kind in ("channel", "block"):
            weights = [fp8_weight((rows, columns), kind) for _ in range(6)]
            for tokens in (1, 16, 64, 256, 4096):
                x = torch.randn(tokens, columns, device="cuda").to(BF16)
                calls: list[Callable[[], object]] = [lambda x=x, w=w: fp8_linear(x, w) for w in weights]
                num_bytes = rows * columns + 2.0 * tokens * (rows + columns)
                points.append(
                    Point(f"fp8 {kind} {name} T={tokens}", calls, num_bytes, 2.0 * tokens * rows * columns)
                )
    compile_ahead(lambda: call_each(point.calls[0] for point in points), os.cpu_count() or 1)
    for point in points:
        yield _row(point.name, point.calls, point.num_bytes, point.flop, FLOOR_FP8_FLOP_PER_S)


def bench_fp8_parts(model: MoeModel) -> Iterator[Row]:
    """The launches of a layer with block scales, each by itself."""
    for num_tokens in (16, 4096):
        for point in layer_part_points(model, num_tokens):
            yield _row(point.name, point.calls, point.num_bytes, point.flop, FLOOR_FP8_FLOP_PER_S)


def bench_fp8_ranged(model: MoeModel) -> Iterator[Row]:
    """Down and the sum over a token's experts: two launches and one, taking turns."""
    downs = block_downs(model)
    for num_tokens in (2048, 4096, 8192):
        ways, wrong, num_bytes = down_and_sum_ways(model, downs, num_tokens)
        before = wrong()
        timed = time_interleaved({way: [_silent(c) for c in calls] for way, calls in ways.items()})
        marks = dict.fromkeys((*before, *wrong()), " WRONG")
        flop = 2.0 * num_tokens * model.top_k * model.hidden * model.inner
        floor = max(num_bytes / FLOOR_BYTES_PER_S, flop / FLOOR_FP8_FLOP_PER_S) * 1e6
        for way, us in timed.items():
            label = f"fp8 {model.name} T={num_tokens} down and sum, {way}{marks.get(way, '')}"
            yield Row(label, round(us, 2), "us", round(floor, 2), round(flop / us * 1e-6, 1))


def bench_fp8_blocks() -> Iterator[Row]:
    """Dense projections of many rows by block scales: own tiles and torch's product, taking turns."""
    for name, (rows, columns) in FP8_LINEARS.items():
        for tokens in (256, 4096):
            flop = 2.0 * tokens * rows * columns
            num_bytes = rows * columns + 2.0 * tokens * (rows + columns)
            floor = max(num_bytes / FLOOR_BYTES_PER_S, flop / FLOOR_FP8_FLOP_PER_S) * 1e6
            ways = block_product_ways(tokens, rows, columns)
            timed = time_interleaved({way: [_silent(c) for c in calls] for way, calls in ways.items()})
            for way, us in timed.items():
                label = f"fp8 block {name} T={tokens} {way}"
                yield Row(label, round(us, 2), "us", round(floor, 2), round(flop / us * 1e-6, 1))


def _metadata(requests: int, length: int, queries: int) -> AttentionMetadata:
    blocks = -(-length // 16)
    tables = torch.randperm(requests * blocks, device="cuda").to(torch.int32).view(requests, blocks)
    starts = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * queries
    lens = torch.full((requests,), length, dtype=torch.int32, device="cuda")
    return AttentionMetadata(starts, lens, tables, torch.zeros(0, dtype=torch.int64), (), ())


def bench_attention(heads: int, kv_heads: int, dim: int) -> Iterator[Row]:
    """Decodes of 32 x 2k and 8 x 32k, and one causal prefill of 8k."""
    for name, requests, length, queries in (
        ("decode 32x2k", 32, 2048, 1),
        ("decode 8x32k", 8, 32768, 1),
        ("prefill 1x8k", 1, 8192, 8192),
    ):
        calls: list[Callable[[], object]] = []
        for _ in range(1 if queries > 1 else 3):
            metadata = _metadata(requests, length, queries)
            shape = (metadata.block_tables.numel(), 16, kv_heads, dim)
            keys, values = torch.randn(2, *shape, device="cuda", dtype=BF16)
            fused = torch.randn(requests * queries, heads + 2 * kv_heads, dim, device="cuda", dtype=BF16)
            q, out = fused[:, :heads], fused.new_empty(requests * queries, heads, dim)
            calls.append(
                lambda q=q, k=keys, v=values, m=metadata, o=out: paged_attention(q, k, v, m, dim**-0.5, o)
            )
        flop = 2.0 * heads * dim * length * length if queries > 1 else 0.0
        num_bytes = 4.0 * requests * length * kv_heads * dim
        yield _row(f"attention {name} {heads}/{kv_heads} head {dim}", calls, num_bytes, flop)


def bench_latent() -> Iterator[Row]:
    """Latent attention: decodes by bytes, with many heads and in chunks by products; what is around it."""
    for point in chain(attention_points(), prompt_points(), around_points()):
        yield _row(point.name, point.calls, point.num_bytes, point.flop)


def bench_sampling(rows: int = 64, vocab: int = 201_088) -> Iterator[Row]:
    """Greedy, drawn from all, from what each cut leaves, bf16 logits; penalties and masks, float32."""
    logits = [torch.randn(rows, vocab, device="cuda").mul_(3).to(BF16) for _ in range(6)]
    index = torch.arange(rows, device="cuda")
    for name, temperature, top_p, top_k, min_p in (
        ("greedy", 0.0, 1.0, 0, 0.0),
        ("drawn", 1.0, 1.0, 0, 0.0),
        ("top-p 0.9", 1.0, 0.9, 0, 0.0),
        ("top-k 50", 1.0, 1.0, 50, 0.0),
        ("min-p 0.05", 1.0, 1.0, 0, 0.05),
    ):
        batch = SamplingBatch(
            temperature=torch.full((rows,), temperature, device="cuda"),
            top_k=torch.full_like(index, top_k),
            top_p=torch.full((rows,), top_p, device="cuda"),
            seed=index,
            position=index,
            all_greedy=temperature == 0,
            any_cut=top_p < 1 or top_k > 0,
            any_top_k=top_k > 0,
            any_top_p=top_p < 1,
            min_p=torch.full((rows,), min_p, device="cuda") if min_p else None,
        )
        calls = [lambda x=x, batch=batch: sample(x, batch) for x in logits]
        yield _row(f"sampling {name} {rows}x{vocab}", calls, 2.0 * rows * vocab)
    scores, ones = torch.randn(rows, vocab, device="cuda"), torch.ones(rows, device="cuda")
    seen = torch.randint(0, 1000, (rows, vocab), device="cuda") == 0
    penalties = Penalties(seen.to(torch.int32) * 2, index, index, ones * 1.1, ones / 2, ones / 2)
    calls = [lambda: penalize(scores, penalties)] * 6
    yield _row(f"penalties {rows}x{vocab}, a token in 1000 seen", calls, 4.0 * rows * vocab)
    masks = torch.zeros((rows, num_mask_words(vocab)), dtype=torch.int32, device="cuda")
    calls = [lambda: token_bitmask(scores, masks, index)] * 6
    yield _row(f"bit mask {rows}x{vocab}, all masked", calls, 4.0 * rows * vocab)


def bench_small() -> Iterator[Row]:
    """What lies between the GEMMs of gpt-oss-20b."""
    for tokens in (1, 64, 4096):
        x, residual = torch.randn(2, tokens, 2880, device="cuda", dtype=BF16)
        weight = torch.ones(2880, device="cuda", dtype=BF16)
        call = lambda x=x, w=weight, r=residual: rms_norm(x, w, 1e-5, r)  # noqa: E731
        yield _row(f"rms_norm with residual T={tokens}", [call] * 8, 8.0 * tokens * 2880)
        heads = torch.randn(tokens, 80, 64, device="cuda", dtype=BF16)
        caches = torch.zeros(2, 300, 16, 8, 64, device="cuda", dtype=BF16)
        slots, places = torch.arange(tokens, device="cuda"), torch.arange(tokens, device="cuda")
        table = torch.randn(8192, 2, 32, device="cuda")
        call = lambda h=heads, c=caches, s=slots, p=places, t=table: attention_inputs(  # noqa: E731
            h, c[0], c[1], s, positions=p, table=t
        )
        yield _row(f"rotary and cache write T={tokens}", [call] * 8, 4.0 * tokens * 80 * 64)
        ids = torch.rand(tokens, 32, device="cuda").topk(4, dim=1).indices.to(torch.int32)
        yield _row(
            f"cut into blocks T={tokens}", [lambda ids=ids: expert_blocks(ids, 32, 64)] * 8, 32.0 * tokens
        )


def bench_few_rows() -> Iterator[Row]:
    """Dense projections of few rows: the own kernel and cuBLAS, taking turns."""
    for name in SIZES:
        point = few_rows_point(name, 1)
        for num_rows in (1, 2, 4, 8, 16, 32):
            point = with_rows(point, num_rows)
            ways = {"cuBLAS": point.cublas()}
            if num_rows <= MAX_FEW_ROWS:
                device = device_name(point.bias)
                shape = point.shape
                tiles = select_few_rows(num_rows, shape.out_features, shape.in_features, device) or rule(
                    shape
                )
                ways["own"] = point.own(tiles)
                # in a step the weight is on its way while the norm before still runs
                ways |= {f"{way} and norm": point.after_norm(calls) for way, calls in tuple(ways.items())}
            for way, us in time_interleaved(ways).items():
                floor = point.num_bytes / FLOOR_BYTES_PER_S * 1e6
                yield Row(f"linear {name} T={num_rows} {way}", round(us, 2), "us", round(floor, 2))


def bench_router() -> Iterator[Row]:
    """Norm, router and routing, as in a step, with logits by cuBLAS or in parts; and the norm alone."""
    for model in (m for m in MODELS if m.name in ("gpt-oss-20b", "qwen3-30b-a3b", "deepseek-v3-tp8")):
        shape = (model.num_experts, model.hidden)
        weights = [torch.randn(shape, device="cuda").to(BF16) for _ in range(24)]
        bias, scale = (
            torch.randn(shape[0], device="cuda").to(BF16),
            torch.ones(shape[1], device="cuda").to(BF16),
        )
        for num_rows in (1, 16, 32, 64):
            x = torch.randn(num_rows, shape[1], device="cuda").to(BF16)
            ways = router_ways(x, weights, bias, scale, model.top_k)
            for way, us in time_interleaved(ways).items():
                floor = 2.0 * shape[0] * shape[1] / FLOOR_BYTES_PER_S * 1e6
                yield Row(f"router {model.name} T={num_rows} {way}", round(us, 2), "us", round(floor, 2))


def _parts() -> dict[str, Callable[[], Iterator[Row]]]:
    """What --only chooses from; nothing is made before a part is called."""
    models = {model.name: model for model in MODELS}
    tokens = (1, 4, 16, 32, 64, 256, 1024, 4096)
    return {
        "mxfp4": lambda: bench_moe(models["gpt-oss-20b"], tokens, "mxfp4"),
        "bf16": lambda: bench_moe(models["gpt-oss-20b"], tokens, "bf16"),
        "qwen3": lambda: bench_moe(models["qwen3-30b-a3b"], tokens, "bf16"),
        "fp8": lambda: (
            row
            for name in ("qwen3-30b-a3b", "deepseek-v3-tp8")
            for row in bench_moe(models[name], (16, 4096), "fp8_block")
        ),
        "fp8-all": lambda: (
            row
            for name in ("qwen3-30b-a3b", "deepseek-v3-tp8")
            for row in bench_moe(models[name], tokens, "fp8_block")
        ),
        "fp8-channel": lambda: bench_moe(models["llama4-scout"], tokens, "fp8_channel"),
        "fp8-parts": lambda: (
            row for name in ("qwen3-30b-a3b", "deepseek-v3-tp8") for row in bench_fp8_parts(models[name])
        ),
        "fp8-ranged": lambda: bench_fp8_ranged(models["deepseek-v3-tp8"]),
        "fp8-linear": bench_fp8_linear,
        "fp8-blocks": bench_fp8_blocks,
        "attention": lambda: (
            row for shape in ((64, 8, 64), (32, 4, 128)) for row in bench_attention(*shape)
        ),
        "mla": bench_latent,
        "sampling": bench_sampling,
        "small": bench_small,
        "few-rows": bench_few_rows,
        "router": bench_router,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line a figure; exit status 2 where there is no GPU."""
    parts = _parts()
    parser = argparse.ArgumentParser(prog="python -m lorikeet_kernels.bench_base", description=__doc__)
    parser.add_argument(
        "--only",
        type=names_among(parts),
        default="mxfp4,bf16,attention,mla,sampling,small,few-rows,router",
        help=f"parts, with commas, of {', '.join(parts)}; default: %(default)s",
    )
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("bench_base: needs a GPU, torch.cuda.is_available() is False here\n")
        return 2
    rows: list[Row] = []
    sys.stdout.write(f"{device_name(torch.empty(0, device='cuda'))}\n")
    for part in options.only:
        for row in parts[part]():
            rows.append(row)
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
        torch.cuda.empty_cache()
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
