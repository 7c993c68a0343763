"""What adapters add to the layers of a decode graph, by the way their LoRA runs; needs an NVIDIA GPU.

    python benchmarks/lora_beside.py                                gpt-oss-20b, 8 adapters of rank 32
    python benchmarks/lora_beside.py --shape qwen3-30b-a3b --ways "dense and down,joined and down"
    python benchmarks/lora_beside.py --tiny                         equal bits? On a CPU, joined ways not run

A way names the parts of LoRA that run beside the base's GEMMs; "all" is "dense and gate_up and down". With
"joined" a dense projection's own launch makes its delta where it takes so few rows, and elsewhere that runs
beside. "none" (no adapters) and "in a row" are always among the ways. Layers are whole, with attention over
short contexts; embedding, head and the sorting of rows are left out. Bits that differ are exit code 1.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from inference_service.execution.kv_cache import allocate_cache
from inference_service.layers.batch import ForwardBatch, LoraBatch
from inference_service.layers.decoder import Decoder
from inference_service.models import ModelDescription, compute_dtype, describe_model, load_model
from lorikeet_bench.engine.floors import FloorModel
from lorikeet_bench.load.generated_adapters import AdapterShape
from lorikeet_bench.load.step_floor import BYTES_PER_S
from lorikeet_bench.machine import describe_machine
from lorikeet_bench.model_shape import shape_config, write_model_shape
from lorikeet_bench.writable import unwritable_reason
from lorikeet_contract.schema import LoraSchema
from lorikeet_kernels.attention.attention_metadata import AttentionMetadata
from lorikeet_kernels.benchmarking.graph_timing import call_each, time_interleaved
from lorikeet_kernels.launch.compile_ahead import compile_ahead
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.side_stream import SideStream
from lorikeet_kernels.testing import SiteShape, SlotSite, make_tables
from lorikeet_kernels.tiling.lora_overlap import BesideRows

SHAPES = (
    "gpt-oss-20b",
    "qwen3-30b-a3b",
    "qwen3-30b-a3b-fp8",
    "deepseek-v2-lite",
    "llama-4-scout-fp8",
    "qwen3-32b",
    "llama-3.3-70b-fp8",
)
# Every site of a layer but the router's; a model has some of them.
SITES = (
    *("q", "k", "v", "o", "kv_a", "kv_b", "gate_up", "down"),
    *("shared_gate_up", "shared_down", "mlp_gate_up", "mlp_down"),
)
TINY_VOCABULARY = 512
# Of all families' names for sizes, each reads its own; FP8 blocks are 128 wide.
TINY: dict[str, object] = {
    "hidden_size": 128, "intermediate_size": 128, "intermediate_size_mlp": 128, "moe_intermediate_size": 128,
    "vocab_size": TINY_VOCABULARY, "first_k_dense_replace": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 16, "num_experts": 16,
    "eos_token_id": 500, "bos_token_id": 501, "pad_token_id": None,
}  # fmt: skip
NONE, IN_A_ROW = "none", "in a row"
PARTS = ("dense", "gate_up", "down", "joined", "joined_down")
WAYS = "down,dense,gate_up,dense and down,all,joined and down,joined and gate_up and down"
CONTEXT, BLOCK_TOKENS = 128, 16
# Deltas of about the size of what the base adds: experts are chosen as evenly with adapters as without.
ADAPTER_FACTOR = 0.3

Ways = dict[str, BesideRows | None]
# Of each way the microseconds of a graph, None on a CPU, and whether its bits are the right ones.
Found = dict[str, tuple[float | None, bool]]


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """A model's layers with adapters, and decode batches: row t has token t, of a request of its own."""

    decoder: Decoder
    tables: LoraTables
    tokens: torch.Tensor  # [max rows, H]
    batch: Callable[[int, LoraBatch], ForwardBatch]
    workspace: LoraWorkspace

    def on(self, slots: torch.Tensor, beside: BesideRows | None) -> tuple[Callable[[], None], torch.Tensor]:
        """A call for rows of these slots [T], and what it leaves [T, H]; no LoRA where `beside` is None."""
        side = None if beside is None else SideStream.on(slots.device, beside)
        segments = make_lora_segments(slots, self.tables.rank.shape[0], self.workspace)
        lora = LoraBatch(segments, self.tables, is_active=beside is not None, side=side)
        batch = self.batch(len(slots), lora)
        residual = torch.empty_like(self.tokens[: len(slots)])
        return partial(self._run, residual, batch), residual

    def _run(self, residual: torch.Tensor, batch: ForwardBatch) -> None:
        """`Decoder.forward` behind the embedding; the residual holds the last layer's answer too."""
        residual.copy_(self.tokens[: len(residual)])
        x = None
        for layer, cache in zip(self.decoder.layers, batch.cache, strict=True):
            h = layer.input_norm(residual) if x is None else layer.input_norm.after(x, residual)
            h = layer.mlp_norm.after(layer.attention(h, batch, cache), residual)
            x = layer.feed_forward(h, batch)
        assert x is not None
        self.decoder.final_norm.after(x, residual)


def make_layers(
    description: ModelDescription, rank: int, num_adapters: int, max_rows: int, device: torch.device
) -> Layers:
    """Random weights, as `--load-format dummy`, adapters at every site of the benches, filled caches."""
    dtype = compute_dtype(description, "auto", device)
    loaded = load_model(
        description, dtype=dtype, device=device, num_positions=CONTEXT, load_format="dummy",
    )  # fmt: skip
    blocks_each = CONTEXT // BLOCK_TOKENS
    caches = allocate_cache(
        [layer.attention for layer in description.spec.layers], max_rows * blocks_each, BLOCK_TOKENS, dtype,
        device, loaded.kv_scales,
    )  # fmt: skip
    for cache in caches:
        cache.keys.normal_()
        cache.values.normal_()

    def batch(rows: int, lora: LoraBatch) -> ForwardBatch:
        ints = partial(torch.arange, dtype=torch.int32, device=device)
        attention = AttentionMetadata(
            query_starts=ints(rows + 1),
            sequence_lens=torch.full_like(ints(rows), CONTEXT),
            block_tables=ints(rows * blocks_each).view(rows, blocks_each),
            slot_mapping=torch.arange(rows, device=device) * CONTEXT + CONTEXT - 1,
        )
        ids = torch.arange(rows, device=device)
        return ForwardBatch(ids, torch.full_like(ids, CONTEXT - 1), attention, caches, lora)

    tables = adapter_tables(loaded.schema, rank, num_adapters, dtype, device)
    tokens = loaded.decoder.embed.weight[:max_rows]
    return Layers(loaded.decoder, tables, tokens, batch, LoraWorkspace(device))


def adapter_tables(
    schema: LoraSchema, rank: int, num_adapters: int, dtype: torch.dtype, device: torch.device
) -> LoraTables:
    """Each adapter in a slot of its own, with one A at each site that the loads' adapters have."""
    sites = [SiteShape(site.in_features, site.out_features, site.num_experts) for site in schema.sites]
    have = [SlotSite(rank if site.key in SITES else 0) for site in schema.sites]
    tables = make_tables(sites, [have] * num_adapters, dtype=dtype, device=device)
    tables.arena.mul_(ADAPTER_FACTOR)
    return tables


def measure(layers: Layers, num_rows: int, num_adapters: int, ways: Ways) -> Found:
    """All ways of one batch, taking turns."""
    device = layers.tokens.device
    slots = torch.arange(num_rows, dtype=torch.int32, device=device).remainder_(num_adapters)
    calls = {name: layers.on(slots, beside) for name, beside in ways.items()}
    times: dict[str, float] = {}
    if device.type == "cuda":
        # As the engine captures: the side stream's work comes second.
        stream = torch.cuda.Stream(device, priority=-1)
        times = time_interleaved({n: [call] for n, (call, _) in calls.items()}, rounds=30, stream=stream)
    else:
        call_each(call for call, _ in calls.values())
    # Every other row without an adapter: those have the bits of a batch in which none has one.
    is_base = torch.arange(num_rows, device=device) % 2 == 0
    mixed = {name: layers.on(slots.masked_fill(is_base, -1), beside) for name, beside in ways.items()}
    call_each(call for call, _ in mixed.values())
    found: Found = {}
    for name, beside in ways.items():
        as_in_a_row = torch.equal(calls[name][1], calls[IN_A_ROW][1]) is (beside is not None)
        as_none = torch.equal(mixed[name][1][is_base], calls[NONE][1][is_base])
        found[name] = times.get(name), as_in_a_row and as_none
    return found


def figures(num_rows: int, num_adapters: int, floors: FloorModel, found: Found) -> Iterator[dict[str, Any]]:
    """A row for each way: microseconds a layer, where there are any, and what its bytes take at the least."""
    must, num_layers = floors.decode(num_rows, num_adapters, CONTEXT), len(floors.spec.layers)
    for way, (us, same_bits) in found.items():
        adapters, added_bytes = ("", 0.0) if way == NONE else (f", {num_adapters} adapters", must.adapters)
        rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
        row = {"name": f"decode graph a layer, {rows}{adapters}: {way}", "same_bits": same_bits}
        if us is not None:
            floor_bytes = must.total - must.lm_head - must.adapters + added_bytes
            each = {
                "value": us, "floor": floor_bytes / BYTES_PER_S * 1e6,
                "added": us - (found[NONE][0] or 0.0), "added_floor": added_bytes / BYTES_PER_S * 1e6,
            }  # fmt: skip
            row |= {"unit": "us", **{key: round(value / num_layers, 2) for key, value in each.items()}}
        yield row


def run(arguments: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """All numbers of rows; figures are printed as they come."""
    device = torch.device("cpu" if arguments.tiny else "cuda")
    changes: dict[str, object] = {"num_hidden_layers": arguments.layers}
    if arguments.tiny:
        known = shape_config(arguments.shape)
        changes |= {field: value for field, value in TINY.items() if field in known}
    description = describe_model(write_model_shape(scratch, arguments.shape, changes))
    floors = FloorModel(description.spec, torch.bfloat16, AdapterShape(arguments.rank, SITES))
    ways, num_adapters = arguments.ways, arguments.adapters
    layers = make_layers(description, arguments.rank, num_adapters, max(arguments.rows), device)
    if device.type == "cuda":
        slots = torch.zeros(max(arguments.rows), dtype=torch.int32, device=device)
        asked = [(slots[:rows], beside) for rows in arguments.rows for beside in ways.values()]
        compile_ahead(lambda: call_each(layers.on(*each)[0] for each in asked), os.cpu_count() or 1)
    made: list[dict[str, Any]] = []
    for num_rows in arguments.rows:
        for row in figures(num_rows, num_adapters, floors, measure(layers, num_rows, num_adapters, ways)):
            made.append(row)
            print(f"{row['name']:80}", *(f"{k} {v}" for k, v in row.items() if k != "name"), flush=True)
    return made


def words(text: str) -> list[str]:
    """What stands between commas, each once."""
    found = [*dict.fromkeys(word.strip() for word in text.split(",") if word.strip())]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return found


def row_counts(text: str) -> list[int]:
    """Numbers with commas between."""
    if wrong := [word for word in words(text) if not word.isdecimal() or not int(word)]:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: numbers of rows are integers from 1 on")
    return [*dict.fromkeys(map(int, words(text)))]


def named_way(name: str) -> BesideRows:
    """The rows of each part of LoRA: all of the parts that the way names, none of the others."""
    parts = {"all": ["dense", "gate_up", "down"], IN_A_ROW: []}.get(name, name.split(" and "))
    if unknown := sorted({*parts} - {*PARTS}):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: a way names some of {', '.join(PARTS)}")
    parts = [*parts, "dense"] if "joined" in parts else parts
    parts = [*parts, "down"] if "joined_down" in parts else parts
    rows = {part: range(1, sys.maxsize if part in parts else 1) for part in PARTS}
    rows["fp8_joined_down"] = rows.pop("joined_down")
    return BesideRows(**rows, fp8_gate_up=rows["gate_up"], packed_gate_up=rows["gate_up"])


def way_list(text: str) -> Ways:
    """The ways by name, what they are held against first."""
    return {NONE: None} | {name: named_way(name) for name in (IN_A_ROW, *words(text)) if name != NONE}


def main(argv: Sequence[str]) -> int:
    """Parse, measure, write; 1 where a way's bits are not those of the others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rows", type=row_counts, default="1,8,16,32,64", help="with commas")
    parser.add_argument("--ways", type=way_list, default=WAYS, help="with commas; default: %(default)s")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tiny", action="store_true", help="a toy on a CPU: bits alone, no times")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    if min(arguments.rank, arguments.adapters, arguments.layers) < 1:
        parser.error("rank, adapters and layers are at least 1")
    if arguments.tiny and max(arguments.rows) > TINY_VOCABULARY:
        parser.error(f"argument --rows: a toy has {TINY_VOCABULARY} tokens, one for each row at the most")
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("no NVIDIA GPU here, and these figures are of one; --tiny runs a toy on a CPU")
    if arguments.json and (reason := unwritable_reason(arguments.json)):
        parser.error(f"argument --json: {reason}")
    with torch.inference_mode(), tempfile.TemporaryDirectory(prefix="lorikeet-shape-") as scratch:
        rows = run(arguments, Path(scratch))
    if arguments.json:
        document: dict[str, Any] = {key: getattr(arguments, key) for key in ("shape", "rank", "layers")}
        document["device"] = "cpu" if arguments.tiny else torch.cuda.get_device_name()
        document |= {"machine": asdict(describe_machine("torch", "triton")), "rows": rows}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(row["same_bits"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
