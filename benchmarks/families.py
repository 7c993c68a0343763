"""Runs the end-to-end benches of one model of each family, and makes their rows.

    python -m benchmarks.families [--only MODEL,...] [--tiny] [--list]

One engine a model with room for eight adapters of rank 16 at every site: concurrency 1 and 32, without
adapters and with all of them. Other settings of the engine (--engine-set) have results, rows and a file of
their own, named after them; kv_cache_dtype=fp8 is refused by models with latent attention. A model that
fails does not stop the others; the exit code says that one did.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.end_to_end_rows import Row, as_table, figure_alone
from lorikeet_bench.engine.floors import FloorModel
from lorikeet_bench.load.generated_adapters import AdapterShape
from lorikeet_bench.model_shape import write_model_shape

RESULTS = Path(__file__).parent / "results"
INPUT_TOKENS, OUTPUT_TOKENS = 512, 192
CONTEXT_TOKENS = INPUT_TOKENS + OUTPUT_TOKENS / 2
RANK, ADAPTERS, CONCURRENCY = 16, 8, (1, 32)
# The least share of the base's tokens/s that eight adapters must leave, by concurrency, and the hope.
RATIOS = {1: (0.85, 0.90), 32: (0.78, 0.85)}
DENSE = ("q", "k", "v", "o", "mlp_gate_up", "mlp_down")
EXPERTS = ("q", "k", "v", "o", "gate_up", "down")
TINY = (
    "num_hidden_layers=2",
    "hidden_size=128",
    "intermediate_size=128",
    "vocab_size=512",
    "eos_token_id=500",
)


@dataclass(frozen=True)
class Model:
    """A shape, the sites that its adapters are on, and what makes a toy of it (FP8 blocks are 128 wide)."""

    shape: str
    sites: tuple[str, ...]
    tiny: tuple[str, ...] = TINY


_TINY_MOE = (*TINY, "moe_intermediate_size=128", "bos_token_id=501")
MODELS = (
    Model("qwen3-30b-a3b", EXPERTS, _TINY_MOE),
    Model("qwen3-30b-a3b-fp8", EXPERTS, _TINY_MOE),
    Model(
        "deepseek-v2-lite",
        (
            "q",
            "kv_a",
            "kv_b",
            "o",
            "gate_up",
            "down",
            "shared_gate_up",
            "shared_down",
            "mlp_gate_up",
            "mlp_down",
        ),
        (*_TINY_MOE, "first_k_dense_replace=1"),
    ),
    Model(
        "llama-4-scout-fp8",
        (*EXPERTS, "shared_gate_up", "shared_down"),
        (*TINY, "intermediate_size_mlp=128", "attention_chunk_size=32", "bos_token_id=501"),
    ),
    Model("qwen3-32b", DENSE, (*TINY, "bos_token_id=501")),
    Model("llama-3.3-70b-fp8", DENSE, (*TINY, "bos_token_id=501")),
)


def command(model: Model, arguments: argparse.Namespace, work: Path) -> list[str]:
    """The bench of a model, whose result goes to `result_file`."""
    line = [
        *(sys.executable, "-m", "lorikeet_admin", "bench", "engine", "--shape", model.shape),
        *("--adapters", f"0,{ADAPTERS}", "--rank", str(RANK), "--sites", ",".join(model.sites)),
        *("--concurrency", ",".join(map(str, CONCURRENCY)), "--warm-up", "2", "--probe-steps", "0"),
        *("--input-tokens", "24" if arguments.tiny else str(INPUT_TOKENS)),
        *("--output-tokens", "6" if arguments.tiny else str(OUTPUT_TOKENS)),
        *("--device", arguments.device, "--json", str(result_file(work, model, arguments.engine_set))),
    ]
    for item in model.tiny if arguments.tiny else ():
        line += ["--shape-set", item]
    for item in arguments.engine_set:
        line += ["--engine-set", item]
    return line


def suffix(settings: Sequence[str]) -> str:
    """What files of other settings than the default have in their names."""
    return "".join("-" + re.sub(r"[^\w.=]+", "_", item) for item in sorted(settings))


def result_file(work: Path, model: Model, settings: Sequence[str] = ()) -> Path:
    """Where a model's result with these settings lies."""
    return work / f"families-{model.shape}{suffix(settings)}.json"


def make_rows(
    model: Model, result: dict[str, Any], floors: FloorModel, settings: Sequence[str] = ()
) -> Iterator[Row]:
    """Speeds beside their floors, the ratios beside their musts, start-up and compilations."""
    name = ", ".join((model.shape, *sorted(settings)))
    points = {(point["concurrency"], point["adapters"]): point["median"] for point in result["points"]}
    for (concurrency, adapters), median in points.items():
        where = f"{name}, concurrency {concurrency}, {adapters} adapters"
        step_s = floors.decode(concurrency, adapters, CONTEXT_TOKENS).seconds
        value = median["decode_tokens_per_s"]["mean"]
        yield Row(f"{where}: decode tokens/s a request", value, "tokens/s", 1 / step_s)
        most = floors.closed_loop_tokens_per_s(concurrency, adapters, INPUT_TOKENS, OUTPUT_TOKENS)
        yield Row(f"{where}: tokens/s", median["tokens_per_s"], "tokens/s", most)
        least_ms = 1e3 * floors.closed_loop_ttft_s(concurrency, INPUT_TOKENS)
        yield Row(f"{where}: TTFT mean", median["ttft_ms"]["mean"], "ms", least_ms)
    for concurrency, (must, hope) in RATIOS.items():
        base, adapted = points.get((concurrency, 0)), points.get((concurrency, ADAPTERS))
        if base and adapted:
            at_least = floors.decode(concurrency, 0, CONTEXT_TOKENS).total
            at_least /= floors.decode(concurrency, ADAPTERS, CONTEXT_TOKENS).total
            words = f"{name}, concurrency {concurrency}: tokens/s with {ADAPTERS} adapters over without"
            ratio = adapted["tokens_per_s"] / base["tokens_per_s"]
            yield Row(words, ratio, "ratio", at_least, target=must, stretch=hope)
    for server in result["servers"]:
        yield Row(f"{name}: start-up to READY", server["startup_s"], "s")
        after = server["compilations"]
        yield Row(f"{name}: compilations after READY", after, "count", 0.0, target=0.0)


def write_rows(work: Path, output: Path, settings: Sequence[str] = (), *, is_toy: bool = False) -> None:
    """Rows of all results with these settings that lie in `work`; one that is void gives its failures.

    A toy's rows are figures alone: floors and musts are the real models' on a GPU.
    """
    rows: list[Row] = []
    failures: dict[str, list[str]] = {}
    machines: dict[str, Any] = {}
    for model in MODELS:
        file = result_file(work, model, settings)
        if not file.exists():
            continue
        result = json.loads(file.read_bytes())
        if result.get("failures"):
            failures[model.shape] = result["failures"]
            continue
        with tempfile.TemporaryDirectory() as directory:
            shape = write_model_shape(Path(directory), model.shape)
            adapters = replace(AdapterShape(), rank=RANK, sites=model.sites)
            rows += make_rows(model, result, FloorModel.read(shape, torch.bfloat16, adapters), settings)
        machines[model.shape] = result.get("machine")
    if is_toy:
        rows = [figure_alone(row) for row in rows]
    output.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "engine_settings": sorted(settings),
        "machines": machines,
        "failures": failures,
        "rows": [asdict(row) for row in rows],
    }
    output.write_text(json.dumps(document, indent=1) + "\n")
    print(as_table(rows))
    for name, reasons in failures.items():
        print(f"{name} gives no rows: {'; '.join(reasons)}")
    print(f"{len(rows)} rows in {output}")


def run(model: Model, arguments: argparse.Namespace, work: Path) -> bool:
    """Run a model's bench, show what it prints; False if it failed. An old result of it is removed first."""
    result_file(work, model, arguments.engine_set).unlink(missing_ok=True)
    line = command(model, arguments, work)
    print(f"== {model.shape}: {' '.join(line[1:])}", flush=True)
    begun_s = time.monotonic()
    code = subprocess.run(line, check=False).returncode
    print(f"== {model.shape}: exit code {code} after {time.monotonic() - begun_s:.0f} s", flush=True)
    return code == 0


def main(argv: Sequence[str]) -> int:
    """Run the models that were asked for, then write the rows; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="models, with commas")
    parser.add_argument("--tiny", action="store_true", help="toys of the same form; say nothing of speed")
    parser.add_argument("--list", action="store_true", help="show the commands and run nothing")
    parser.add_argument("--device", default="", help="cuda; with --tiny cpu")
    parser.add_argument(
        "--engine-set",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="a setting, which names its files and rows",
    )
    parser.add_argument("--work", type=Path, default=Path("var/benchmarks"), help="the models' results")
    parser.add_argument("--output", type=Path, help="the rows; default: benchmarks/results")
    arguments = parser.parse_args(argv)
    arguments.device = arguments.device or ("cpu" if arguments.tiny else "cuda")
    # A toy's results lie apart: rows are made of all that is found.
    work = arguments.work.absolute() / ("tiny" if arguments.tiny else "")
    names = [name for name in arguments.only.split(",") if name]
    if unknown := set(names) - {model.shape for model in MODELS}:
        known = ", ".join(model.shape for model in MODELS)
        parser.error(f"no models {', '.join(sorted(unknown))}; there are {known}")
    models = [model for model in MODELS if not names or model.shape in names]
    if arguments.list:
        for model in models:
            print(" ".join(command(model, arguments, work)))
        return 0
    work.mkdir(parents=True, exist_ok=True)
    failed = [model.shape for model in models if not run(model, arguments, work)]
    place = work if arguments.tiny else RESULTS
    size = "tiny" if arguments.tiny else "h200"
    default = place / f"families_{size}{suffix(arguments.engine_set)}.json"
    write_rows(work, arguments.output or default, arguments.engine_set, is_toy=arguments.tiny)
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
