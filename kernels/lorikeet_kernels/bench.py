"""`python -m lorikeet_kernels.bench`: time, GB/s and share of the byte floor of the LoRA ops."""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence

import torch

from lorikeet_kernels.benchmarking.bench_problem import (
    DENSE,
    MODELS,
    DenseSites,
    MoeInputs,
    MoeModel,
    make_dense_inputs,
    make_dense_layers,
    make_inputs,
    make_layers,
    num_layers,
    num_sets,
)
from lorikeet_kernels.benchmarking.graph_timing import time_interleaved
from lorikeet_kernels.benchmarking.list_options import counts, names_among
from lorikeet_kernels.lora.lora_linear import lora_linear
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.moe_groups import MoeGroups, make_moe_groups
from lorikeet_kernels.lora.moe_lora import moe_lora_down, moe_lora_gate_up
from lorikeet_kernels.tiling import is_ungrouped


def copy_bytes_per_s() -> float:
    """The card's own ceiling: a plain copy, read and written bytes counted."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)

    seconds: list[float] = []
    for _ in range(9):  # outside a graph: a graph's copy node takes another, slower way
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) * 1e-3)
    return 2 * source.numel() * 2 / statistics.median(seconds)


def _branch(
    model: MoeModel, tables: LoraTables, inputs: MoeInputs, groups: MoeGroups | None
) -> Callable[[], None]:
    def run() -> None:
        made = groups
        if groups is not None:
            made = make_moe_groups(inputs.topk_ids, inputs.segments, model.num_experts, groups)
        moe_lora_gate_up(
            inputs.gate_up,
            inputs.x,
            inputs.topk_ids,
            made,
            inputs.segments,
            tables,
            inputs.gate_up_site,
            model.row_order,
        )
        moe_lora_down(
            inputs.down,
            inputs.act,
            inputs.topk_ids,
            inputs.topk_weights,
            made,
            inputs.segments,
            tables,
            inputs.down_site,
        )

    return run


def bench_layer(model: MoeModel, rank: int, num_slots: int, num_tokens: int, ceiling: float) -> str:
    """One line: both projections of a layer with grouping where it is used, over cold sets."""
    workspace = LoraWorkspace(torch.device("cuda"))
    first = make_inputs(model, rank, num_slots, num_tokens, 0, workspace, 0)
    count = num_sets(first.floor_bytes)
    per_expert = rank * (model.num_a * model.hidden + 3 * model.inner + model.hidden)
    layers = num_layers(2 * num_slots * model.num_experts * per_expert, count)
    tables = make_layers(model, rank, num_slots, layers)
    sets = [make_inputs(model, rank, num_slots, num_tokens, i % layers, workspace, i) for i in range(count)]
    ungrouped = is_ungrouped(first.topk_ids.numel(), model.num_experts, num_slots)
    calls = [
        _branch(
            model,
            tables,
            s,
            None if ungrouped else make_moe_groups(s.topk_ids, s.segments, model.num_experts),
        )
        for s in sets
    ]
    moved = sum(s.floor_bytes for s in sets) / count
    return _line(f"{model.name:18} {rank:4} {num_slots:5} {num_tokens:6}", calls, moved, ceiling)


def bench_dense(dense: DenseSites, rank: int, num_slots: int, num_tokens: int, ceiling: float) -> str:
    """One line: a fused dense projection over cold sets, the step's segments made before."""
    workspace = LoraWorkspace(torch.device("cuda"))
    first = make_dense_inputs(dense, rank, num_slots, num_tokens, 0, workspace, 0)
    count = num_sets(first.floor_bytes)
    weights = 2 * num_slots * rank * dense.adapter_elements
    layers = num_layers(weights, count)
    tables = make_dense_layers(dense, rank, num_slots, layers)
    sets = [
        make_dense_inputs(dense, rank, num_slots, num_tokens, i % layers, workspace, i) for i in range(count)
    ]
    calls = [
        lambda s=s: lora_linear(s.out, s.x, s.segments, tables, s.sites, dense.widths, dense.slices)
        for s in sets
    ]
    moved = sum(s.floor_bytes for s in sets) / count
    return _line(f"{dense.name:18} {rank:4} {num_slots:5} {num_tokens:6}", calls, moved, ceiling)


def _line(sizes: str, calls: Sequence[Callable[[], None]], moved: float, ceiling: float) -> str:
    us = time_interleaved({"lora": calls})["lora"]
    floor_us = moved / ceiling * 1e6
    return f"{sizes} {us:9.2f} {floor_us:9.2f} {floor_us / us:6.0%} {moved / us / 1e3:8.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; exit status 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m lorikeet_kernels.bench", description=__doc__)
    known = {shape.name: shape for shape in (*MODELS, *DENSE)}
    parser.add_argument(
        "--models",
        type=names_among(known),
        default="gpt-oss-20b,qwen3-30b-a3b",
        help=f"with commas, of {', '.join(known)}; default: %(default)s",
    )
    parser.add_argument("--ranks", type=counts, default="16")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--tokens", type=counts, default="1,16,64,256,1024,4096")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("bench: needs a GPU, torch.cuda.is_available() is False here\n")
        return 2
    ceiling = copy_bytes_per_s()
    sys.stdout.write(f"{torch.cuda.get_device_name()}, copy {ceiling / 1e12:.2f} TB/s\n")
    sys.stdout.write("model              rank slots tokens        us  floor us  share     GB/s\n")
    for name in options.models:
        for rank in options.ranks:
            for tokens in options.tokens:
                shape = known[name]
                at = (rank, options.adapters, tokens, ceiling)
                line = bench_dense(shape, *at) if isinstance(shape, DenseSites) else bench_layer(shape, *at)
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
