"""Runs the end-to-end benches of one model of each family, and makes their rows.

    python -m benchmarks.families [--only MODEL,...] [--seconds S] [--resume] [--profiles] [--tiny] [--list]

One engine a model with room for eight adapters of rank 16 at every site: concurrency 1 and 32, without
adapters and with all of them. Other settings of the engine (--engine-set) have results, rows and a file of
their own, named after them; kv_cache_dtype=fp8 is refused by models with latent attention. A model that
fails or takes longer than --model-seconds does not stop the others; the exit code says that one did.

Kernels depend on a model's sizes, not on how many layers it has: first all models start at once with two or
four layers each, which fills Triton's cache on all cores, and then one after the other as they are. Rows are
written after each, beside those that the file has of others: what does not fit into one session is left to
the next, by --resume. With --profiles each model's decode steps are profiled behind its bench.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.device import check_device
from benchmarks.family_models import INPUT_TOKENS, MODELS, Model
from benchmarks.rows_file import Row, figure_alone, merge_rows, read_document, show_rows, write_document
from lorikeet_bench.engine.floors import FloorModel
from lorikeet_bench.load.generated_adapters import AdapterShape
from lorikeet_bench.model_shape import write_model_shape

RESULTS = Path(__file__).parent / "results"
RANK, ADAPTERS, CONCURRENCY = 16, 8, (1, 32)
# The least share of the base's tokens/s that eight adapters must leave, by concurrency, and the hope.
RATIOS = {1: (0.85, 0.90), 32: (0.78, 0.85)}
# What these lengths can ask for, to be captured in a third of the time; rows fill a step up as by default.
ENGINE = ("max_context_tokens=1024", "graph_token_counts=[64,128,256,512,640,1152,1664,2048]")
COMPILE_SECONDS = 90.0  # at most, all models together
PROFILE_SECONDS = 25.0  # of a model's profiles, the engine's start included
MOST_KERNELS = 20  # of a profile, the longest


def command(model: Model, arguments: argparse.Namespace, work: Path) -> list[str]:
    """The bench of a model, whose result goes to `result_file`."""
    return [
        *_command("engine", model, arguments, result_file(work, model, arguments.engine_set)),
        *("--warm-up", "2", "--probe-steps", "0"),
        *("--output-tokens", "6" if arguments.tiny else str(model.output_tokens)),
    ]


def profile_command(model: Model, arguments: argparse.Namespace, work: Path) -> list[str]:
    """The profile of the same points' decode steps, which goes to `profile_file`."""
    return [
        *_command("profile", model, arguments, profile_file(work, model, arguments.engine_set)),
        *("--steps", "2" if arguments.tiny else "10"),
    ]


def _command(verb: str, model: Model, arguments: argparse.Namespace, result: Path) -> list[str]:
    line = [
        *(sys.executable, "-m", "lorikeet_admin", "bench", verb, "--shape", model.shape),
        *("--adapters", f"0,{ADAPTERS}", "--rank", str(RANK), "--sites", ",".join(model.sites)),
        *("--concurrency", ",".join(map(str, CONCURRENCY))),
        *("--input-tokens", "24" if arguments.tiny else str(INPUT_TOKENS)),
        *("--device", arguments.device, "--json", str(result)),
    ]
    for item in model.tiny if arguments.tiny else ():
        line += ["--shape-set", item]
    for item in (*(() if arguments.tiny else ENGINE), *arguments.engine_set):
        line += ["--engine-set", item]
    return line


def compile_command(model: Model, arguments: argparse.Namespace, work: Path) -> list[str]:
    """The same with a few layers and one request a point, for what its start compiles."""
    line = command(model, arguments, work)
    line[line.index("--adapters") + 1] = str(ADAPTERS)
    del line[line.index("--json") : line.index("--json") + 2]
    return [*line, "--requests", "1", "--shape-set", f"num_hidden_layers={model.kinds}"]


def suffix(settings: Sequence[str]) -> str:
    """What files of other settings than the default have in their names."""
    return "".join("-" + re.sub(r"[^\w.=]+", "_", item) for item in sorted(settings))


def result_file(work: Path, model: Model, settings: Sequence[str] = ()) -> Path:
    """Where a model's result with these settings lies."""
    return work / f"families-{model.shape}{suffix(settings)}.json"


def profile_file(work: Path, model: Model, settings: Sequence[str] = ()) -> Path:
    """Where the profiles of its decode steps with these settings lie."""
    return work / f"families-profile-{model.shape}{suffix(settings)}.json"


def make_rows(
    model: Model, result: dict[str, Any], floors: FloorModel, settings: Sequence[str] = ()
) -> Iterator[Row]:
    """Speeds beside their floors, the ratios beside their musts, start-up and compilations."""
    name = ", ".join((model.shape, *sorted(settings)))
    points = {(point["concurrency"], point["adapters"]): point["median"] for point in result["points"]}
    for (concurrency, adapters), median in points.items():
        where = f"{name}, concurrency {concurrency}, {adapters} adapters"
        step_s = floors.decode(concurrency, adapters, model.context_tokens).seconds
        value = median["decode_tokens_per_s"]["mean"]
        yield Row(f"{where}: decode tokens/s a request", value, "tokens/s", 1 / step_s)
        most = floors.closed_loop_tokens_per_s(concurrency, adapters, INPUT_TOKENS, model.output_tokens)
        yield Row(f"{where}: tokens/s", median["tokens_per_s"], "tokens/s", most)
        least_ms = 1e3 * floors.closed_loop_ttft_s(concurrency, INPUT_TOKENS)
        yield Row(f"{where}: TTFT mean", median["ttft_ms"]["mean"], "ms", least_ms)
    for concurrency, (must, hope) in RATIOS.items():
        base, adapted = points.get((concurrency, 0)), points.get((concurrency, ADAPTERS))
        if base and adapted:
            most, without = (
                floors.closed_loop_tokens_per_s(concurrency, count, INPUT_TOKENS, model.output_tokens)
                for count in (ADAPTERS, 0)
            )
            words = f"{name}, concurrency {concurrency}: tokens/s with {ADAPTERS} adapters over without"
            ratio = adapted["tokens_per_s"] / base["tokens_per_s"]
            yield Row(words, ratio, "ratio", most / without, target=must, stretch=hope)
    for server in result["servers"]:
        yield Row(f"{name}: start-up to READY", server["startup_s"], "s")
        after = server["compilations"]
        yield Row(f"{name}: compilations after READY", after, "count", 0.0, target=0.0)


def short_profile(profile: dict[str, Any]) -> dict[str, Any]:
    """A step's time, its parts beside their floors, and what takes longest; not the gaps of the timeline."""
    of = profile["profile"]
    return {
        **{key: profile[key] for key in ("concurrency", "adapters", "parts")},
        **{key: of[key] for key in ("steps", "step_us", "busy_us")},
        "kernels": sorted(of["ops"], key=lambda op: -op["us"])[:MOST_KERNELS],
    }


def model_of(row_name: str) -> str:
    """The model that a row is of: its name's beginning."""
    return re.split(r"[,:]", row_name, maxsplit=1)[0]


def write_rows(work: Path, output: Path, settings: Sequence[str] = (), *, is_toy: bool = False) -> None:
    """Rows of all results with these settings that lie in `work`; one that is void gives its failures.

    What `output` has of other models is kept. A toy's rows are figures alone: floors and musts are the real
    models' on a GPU.
    """
    document = read_document(output)
    for model in MODELS:
        file = result_file(work, model, settings)
        if not file.exists():
            continue
        result = json.loads(file.read_bytes())
        document["failures"].pop(model.shape, None)
        if result.get("failures"):
            document["failures"][model.shape] = result["failures"]
            continue
        with tempfile.TemporaryDirectory() as directory:
            shape = write_model_shape(Path(directory), model.shape)
            adapters = replace(AdapterShape(), rank=RANK, sites=model.sites)
            floors = FloorModel.read(shape, torch.bfloat16, adapters)
            rows = list(make_rows(model, result, floors, settings))
        machine = result.get("machine", {})
        made = (
            replace(figure_alone(row) if is_toy else row, commit=machine.get("commit", "")) for row in rows
        )
        document["rows"] = merge_rows(document["rows"], made)
        document["machines"][model.shape] = machine
        profiled = profile_file(work, model, settings)
        if profiled.exists():
            profiles = json.loads(profiled.read_bytes())["profiles"]
            document.setdefault("profiles", {})[model.shape] = [short_profile(each) for each in profiles]
    document["engine_settings"] = sorted(settings)
    write_document(output, document)


def run_within(line: Sequence[str], seconds: float) -> int:
    """Run a command for so long at most; its exit code, or 124 where it and all it started was ended."""
    with subprocess.Popen(line, start_new_session=True) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            return 124


def _end(process: "subprocess.Popen[bytes]") -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, sign)
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            continue
        return


def compile_ahead(models: Sequence[Model], arguments: argparse.Namespace, work: Path) -> None:
    """Start all models with few layers at once, for their kernels; what fails is left to its own bench."""
    begun_s = time.monotonic()
    started: list[tuple[Model, subprocess.Popen[bytes]]] = []
    for model in models:
        with (work / f"compile-{model.shape}.txt").open("wb") as log:
            line = compile_command(model, arguments, work)
            process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        started.append((model, process))
    for model, process in started:
        try:
            code = process.wait(max(0.1, begun_s + COMPILE_SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            _end(process)
            code = 124
        taken_s = time.monotonic() - begun_s
        print(f"== {model.shape}: kernels, exit code {code} within {taken_s:.0f} s", flush=True)


def run(model: Model, arguments: argparse.Namespace, work: Path) -> bool:
    """Run a model's bench, show what it prints; False if it failed. Old results of it are removed first.

    A profile that fails leaves the bench's figures what they are.
    """
    for file in (result_file, profile_file):
        file(work, model, arguments.engine_set).unlink(missing_ok=True)
    is_done = _run(model, command(model, arguments, work), arguments.model_seconds)
    if is_done and arguments.profiles:
        _run(model, profile_command(model, arguments, work), arguments.model_seconds)
    return is_done


def _run(model: Model, line: Sequence[str], seconds: float) -> bool:
    print(f"== {model.shape}: {' '.join(line[1:])}", flush=True)
    begun_s = time.monotonic()
    code = run_within(line, seconds)
    print(f"== {model.shape}: exit code {code} after {time.monotonic() - begun_s:.0f} s", flush=True)
    return code == 0


def chosen_models(arguments: argparse.Namespace, output: Path) -> list[Model]:
    """Those that were asked for; with --resume without those that `output` has rows of."""
    names = [name for name in arguments.only.split(",") if name]
    models = [model for model in MODELS if not names or model.shape in names]
    if arguments.resume and output.exists():
        done = {model_of(row["name"]) for row in json.loads(output.read_bytes())["rows"]}
        models = [model for model in models if model.shape not in done]
    return models


def _parser() -> argparse.ArgumentParser:
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
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no model that should take longer than left"
    )
    parser.add_argument(
        "--model-seconds", type=float, default=120.0, help="end a model's bench after so long"
    )
    parser.add_argument("--resume", action="store_true", help="only models that the rows' file has none of")
    parser.add_argument("--profiles", action="store_true", help="of decode steps, behind each model's bench")
    parser.add_argument("--one-by-one", action="store_true", help="each model compiles in its own start")
    parser.add_argument("--work", type=Path, default=Path("var/benchmarks"), help="the models' results")
    parser.add_argument("--output", type=Path, help="the rows; default: benchmarks/results")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the models that were asked for, then write the rows; returns the exit code."""
    begun_s = time.monotonic()
    parser = _parser()
    arguments = parser.parse_args(argv)
    arguments.device = arguments.device or ("cpu" if arguments.tiny else "cuda")
    # A toy's results lie apart: rows are made of all that is found.
    work = arguments.work.absolute() / ("tiny" if arguments.tiny else "")
    if unknown := {name for name in arguments.only.split(",") if name} - {model.shape for model in MODELS}:
        known = ", ".join(model.shape for model in MODELS)
        parser.error(f"no models {', '.join(sorted(unknown))}; there are {known}")
    place = work if arguments.tiny else RESULTS
    size = "tiny" if arguments.tiny else "h200"
    output = arguments.output or place / f"families_{size}{suffix(arguments.engine_set)}.json"
    models = chosen_models(arguments, output)
    if arguments.list:
        for model in models:
            print(" ".join(command(model, arguments, work)))
        return 0
    check_device(parser, arguments.device)
    work.mkdir(parents=True, exist_ok=True)
    if arguments.device != "cpu" and len(models) > 1 and not arguments.one_by_one:
        compile_ahead(models, arguments, work)
    done, failed = 0, list[str]()
    for model in models:
        expected_s = model.expected_s + (PROFILE_SECONDS if arguments.profiles else 0.0)
        if expected_s > begun_s + arguments.seconds - time.monotonic():
            print(f"== {model.shape}: left out, {expected_s:.0f} s are not left", flush=True)
            continue
        if run(model, arguments, work):
            done += 1
        else:
            failed.append(model.shape)
        # Behind one that succeeded a failed one writes as well: its reasons stand beside the rows.
        if done:
            write_rows(work, output, arguments.engine_set, is_toy=arguments.tiny)
    if output.exists():
        show_rows(output)
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
