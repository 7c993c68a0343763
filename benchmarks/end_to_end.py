"""Runs the end-to-end benches of one model, step by step, and makes their rows.

    python -m benchmarks.end_to_end gpt-oss-20b [--quick | --tiny] [--only STEP,...] [--list]

A step that fails does not stop the others; the exit code says that one did. Each step leaves its result in
the work directory, and after each that succeeds rows are made of all that lie there and put among those that
the rows' file has: steps may be run in several sessions, on several machines, and a run that is cut loses one
step. Where no step succeeds the file stays as it was.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.device import check_device
from benchmarks.end_to_end_rows import write_rows
from benchmarks.rows_file import show_rows

RESULTS = Path(__file__).parent / "results"
# The same form in miniature, for trying all this on a CPU.
TINY_SETS = {
    "gpt-oss-20b": (
        *("num_hidden_layers=2", "hidden_size=64", "intermediate_size=64", "vocab_size=512"),
        *("eos_token_id=500", "pad_token_id=null", 'layer_types=["sliding_attention","full_attention"]'),
    ),
    "qwen3-30b-a3b": (
        *("num_hidden_layers=2", "hidden_size=64", "moe_intermediate_size=32", "vocab_size=512"),
        *("eos_token_id=500", "bos_token_id=501"),
    ),
}
# One adapter and 32 alone as well, in the process that has their 64 slots.
CURVE_POINTS = "1:1,1:32,32:1,32:2,32:4,32:8,32:16,32:32,32:64"


@dataclass(frozen=True)
class Step:
    """One command. `is_quick`: part of the quick form, where `quick` replaces what `options` says.

    `model` restricts it to one: 64 adapters of Qwen3-30B-A3B (2.5 GB each) do not fit beside its weights.
    """

    name: str
    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    is_quick: bool = False
    model: str = ""


STEPS = (
    Step(
        "base",
        ("engine", "--adapters", "0"),
        ("--concurrency", "1,16,32", "--repeats", "2"),
        ("--concurrency", "1,32", "--probe-steps", "0"),
        is_quick=True,
    ),
    Step(
        "eight",
        ("engine", "--adapters", "0,8"),
        ("--concurrency", "1,16,32", "--repeats", "2"),
        ("--concurrency", "1,16,32"),
        is_quick=True,
    ),
    Step(
        "lengths",
        (
            *("engine", "--adapters", "8", "--concurrency", "1", "--requests", "200", "--warm-up", "4"),
            *("--input-tokens", "16:2047", "--output-tokens", "2", "--probe-steps", "0"),
        ),
        is_quick=True,
    ),
    Step("curve", ("engine", "--points", CURVE_POINTS, "--probe-steps", "0"), model="gpt-oss-20b"),
    # Tiles by the rules alone, to hold the measured ones against.
    Step(
        "rule",
        (
            *("engine", "--adapters", "8", "--concurrency", "1,32", "--probe-steps", "0"),
            *("--engine-set", "tile_tables=false"),
        ),
    ),
    Step("adapter-load", ("adapter_load",), model="gpt-oss-20b"),
    Step("grpc", ("serve", "--text", "--adapters", "8", "--concurrency", "1,32", "--probe-steps", "0")),
    Step("profile", ("profile", "--concurrency", "1,32", "--adapters", "0,8")),
)


def step_command(step: Step, model: str, arguments: argparse.Namespace, work: Path) -> list[str]:
    """The whole command line of a step."""
    if step.command == ("adapter_load",):
        rank = ["--rank", "4", "--repeat", "1"] if arguments.tiny else []
        script = str(Path(__file__).parent / "adapter_load.py")
        return [sys.executable, script, "--shape", model, "--device", arguments.device, *rank]
    options = step.quick if arguments.quick and step.quick else step.options
    command = [sys.executable, "-m", "lorikeet_admin", "bench", *step.command, *options, "--shape", model]
    command += ["--device", arguments.device, "--json", str(result_file(work, model, step))]
    if step.name == "curve" and find_spec("matplotlib"):
        command += ["--plot", str(result_file(work, model, step).with_suffix(".svg"))]
    if arguments.tiny:
        for item in TINY_SETS[model]:
            command += ["--shape-set", item]
        command += (
            ["--rank", "4", "--routing-floor", "0"] if step.command[0] != "profile" else ["--rank", "4"]
        )
        command += (
            ["--input-tokens", "24"]
            if step.name != "lengths"
            else ["--input-tokens", "8:72", "--requests", "24"]
        )
        command += ["--output-tokens", "6"] if step.command[0] != "profile" else ["--steps", "2"]
        command += ["--repeats", "1"] if step.command[0] != "profile" else []
    return command


def result_file(work: Path, model: str, step: Step) -> Path:
    """Where a step's result lies."""
    return work / f"{model}-{step.name}.json"


def run_step(step: Step, model: str, arguments: argparse.Namespace, work: Path) -> bool:
    """Run a step, show what it prints; False if it failed. An old result of it is removed first."""
    file = result_file(work, model, step)
    file.unlink(missing_ok=True)
    command = step_command(step, model, arguments, work)
    print(f"== {step.name}: {' '.join(command[1:])}", flush=True)
    # A cache of its own, empty for the first step: its start-up is the cold one.
    cache = work / f"{model}-kernels"
    if step is STEPS[0]:
        shutil.rmtree(cache, ignore_errors=True)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    begun_s = time.monotonic()
    is_printed = step.command == ("adapter_load",)
    done = subprocess.run(
        command, env=environment, check=False, stdout=subprocess.PIPE if is_printed else None
    )
    code = done.returncode
    if is_printed:
        print(done.stdout.decode(), end="")
        if code == 0:
            file.write_bytes(done.stdout)
    print(f"== {step.name}: exit code {code} after {time.monotonic() - begun_s:.0f} s", flush=True)
    return code == 0


def main(argv: Sequence[str]) -> int:
    """Run the steps that were asked for, then write the rows; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=sorted(TINY_SETS))
    parser.add_argument("--quick", action="store_true", help="the main rows once, at most 4 GPU minutes")
    parser.add_argument("--tiny", action="store_true", help="a toy of the same form; says nothing of speed")
    parser.add_argument("--only", default="", help="steps, with commas, in this order")
    parser.add_argument("--list", action="store_true", help="show the steps' commands and run nothing")
    parser.add_argument("--device", default="", help="cuda; with --tiny cpu")
    parser.add_argument("--work", type=Path, default=Path("var/benchmarks"), help="the steps' results")
    parser.add_argument("--output", type=Path, help="the rows; default: benchmarks/results")
    arguments = parser.parse_args(argv)
    arguments.device = arguments.device or ("cpu" if arguments.tiny else "cuda")
    # A toy's results lie apart: rows are made of all that is found.
    work = arguments.work.absolute() / ("tiny" if arguments.tiny else "")
    names = [name for name in arguments.only.split(",") if name]
    known = {step.name: step for step in STEPS}
    if unknown := set(names) - set(known):
        parser.error(f"no steps {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in STEPS)}")
    wanted = [known[name] for name in names] or [
        step for step in STEPS if step.is_quick or not arguments.quick
    ]
    steps = [step for step in wanted if step.model in {"", arguments.model}]
    if not steps:
        parser.error(f"none of these steps is of {arguments.model}")
    if arguments.list:
        for step in steps:
            print(" ".join(step_command(step, arguments.model, arguments, work)))
        return 0
    check_device(parser, arguments.device)
    work.mkdir(parents=True, exist_ok=True)
    output = arguments.output
    if output is None:
        place = work if arguments.tiny else RESULTS
        output = place / f"{arguments.model.replace('-', '_')}_{'tiny' if arguments.tiny else 'h200'}.json"
    failed: list[str] = []
    for number, step in enumerate(steps, 1):
        if not run_step(step, arguments.model, arguments, work):
            failed.append(step.name)
        # Behind one that succeeded a failed one writes as well: its reasons stand beside the rows.
        if len(failed) < number:
            write_rows(arguments.model, work, output, is_toy=arguments.tiny)
    if len(failed) < len(steps):
        show_rows(output)
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
