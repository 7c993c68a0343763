"""Runs the end-to-end benches of one model of each family, and makes their rows.

    python -m benchmarks.families [--only MODEL,...] [--seconds S] [--resume] [--profiles] [--tiny] [--list]

One engine a model with room for eight adapters of rank 16 at every site: concurrency 1 and 32, without
adapters and with all of them. Other settings of the engine (--engine-set) have results, rows and a file of
their own, named after them; kv_cache_dtype=fp8 is refused by models with latent attention. A model that
fails or takes longer than --model-seconds does not stop the others: its reason stands beside the rows, which
stay as they were, and the exit code is 1. Ctrl-C and SIGTERM end all that was started.

Kernels depend on a model's sizes, not on how many layers it has: first all models start at once with two or
four layers each, which fills Triton's cache on all cores, and then one after the other as they are. Rows are
written after each, beside those that the file has of others: what does not fit into one session is left to
the next, by --resume. With --profiles each model's decode steps are profiled behind its bench, and with
--resume those of models that have rows but no profiles. Each profile says at which commit it was made.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.child_processes import ENDED, child_processes, orderly_end, run_within, wait_within
from benchmarks.device import check_device
from benchmarks.family_models import ADAPTERS, INPUT_TOKENS, MODELS, RANK, Model
from benchmarks.family_rows import has_rows, profile_file, profile_name, result_file, suffix, write_rows
from benchmarks.rows_file import read_document, show_rows
from lorikeet_bench.writable import unwritable_reason

RESULTS = Path(__file__).parent / "results"
CONCURRENCY = (1, 32)
# What these lengths can ask for, to be captured in a third of the time; rows fill a step up as by default.
ENGINE = ("max_context_tokens=1024", "graph_token_counts=[64,128,256,512,640,1152,1664,2048]")
COMPILE_SECONDS = 90.0  # at most, all models together
PROFILE_SECONDS = 25.0  # of a model's profiles, the engine's start included


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


def compile_ahead(models: Sequence[Model], arguments: argparse.Namespace, work: Path) -> None:
    """Start all models with few layers at once, for their kernels; what fails is left to its own bench."""
    begun_s = time.monotonic()
    with child_processes() as start:
        started = [
            (model, start(compile_command(model, arguments, work), work / f"compile-{model.shape}.txt"))
            for model in models
        ]
        for model, process in started:
            code = wait_within(process, max(0.1, begun_s + COMPILE_SECONDS - time.monotonic()))
            taken_s = time.monotonic() - begun_s
            print(f"== {model.shape}: kernels, exit code {code} within {taken_s:.0f} s", flush=True)


@dataclass(frozen=True)
class Job:
    """What is run of a model, one behind the other: its bench, its profiles or both."""

    model: Model
    has_bench: bool
    has_profile: bool

    @property
    def expected_s(self) -> float:
        """On one H200, starts included."""
        return self.has_bench * self.model.expected_s + self.has_profile * PROFILE_SECONDS

    def commands(self, arguments: argparse.Namespace, work: Path) -> Iterator[tuple[str, list[str], Path]]:
        """What each is called if it fails, its line and its result's file."""
        settings = arguments.engine_set
        if self.has_bench:
            line = command(self.model, arguments, work)
            yield self.model.shape, line, result_file(work, self.model, settings)
        if self.has_profile:
            line = profile_command(self.model, arguments, work)
            yield profile_name(self.model), line, profile_file(work, self.model, settings)


def chosen_jobs(arguments: argparse.Namespace, document: dict[str, Any]) -> list[Job]:
    """Of the models that were asked for; with --resume without what the document has of them."""
    jobs: list[Job] = []
    for model in arguments.only:
        is_measured = arguments.resume and has_rows(document, model)
        is_profiled = arguments.resume and model.shape in document.get("profiles", {})
        jobs.append(Job(model, not is_measured, arguments.profiles and not is_profiled))
    return [job for job in jobs if job.has_bench or job.has_profile]


def run(job: Job, arguments: argparse.Namespace, work: Path) -> dict[str, str]:
    """Run a job, show what it prints; the reason of what failed, behind which nothing more of it is run.

    An old result of what is run is removed first.
    """
    for name, line, file in job.commands(arguments, work):
        file.unlink(missing_ok=True)
        if reason := _run(job.model, line, arguments.model_seconds):
            return {name: reason}
    return {}


def _run(model: Model, line: Sequence[str], seconds: float) -> str:
    print(f"== {model.shape}: {' '.join(line[1:])}", flush=True)
    begun_s = time.monotonic()
    code = run_within(line, seconds)
    print(f"== {model.shape}: exit code {code} after {time.monotonic() - begun_s:.0f} s", flush=True)
    if code == ENDED:
        return f"ended after {seconds:g} s"
    return f"exit code {code}" if code else ""


def run_all(
    jobs: Sequence[Job], arguments: argparse.Namespace, work: Path, output: Path, until_s: float
) -> dict[str, str]:
    """Run what fits into the time and write the rows after each; the reasons of what failed."""
    if arguments.device != "cpu" and len(jobs) > 1 and not arguments.one_by_one:
        compile_ahead([job.model for job in jobs], arguments, work)
    failures: dict[str, str] = {}
    for job in jobs:
        if job.expected_s > until_s - time.monotonic():
            print(f"== {job.model.shape}: left out, {job.expected_s:.0f} s are not left", flush=True)
            continue
        failures |= run(job, arguments, work)
        write_rows(work, output, arguments.engine_set, failures=failures, is_toy=arguments.tiny)
    return failures


def model_list(text: str) -> list[Model]:
    """Models by name, with commas between, in the order of all."""
    names = {name.strip() for name in text.split(",")} - {""}
    known = [model.shape for model in MODELS]
    if unknown := sorted(names.difference(known)):
        raise argparse.ArgumentTypeError(f"no models {', '.join(unknown)}; there are {', '.join(known)}")
    if not names:
        raise argparse.ArgumentTypeError(f"names no model; there are {', '.join(known)}")
    return [model for model in MODELS if model.shape in names]


def duration(text: str) -> float:
    """Seconds, as many as one likes."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 on")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=model_list, default=MODELS, help="models, with commas")
    parser.add_argument("--tiny", action="store_true", help="toys of the same form; say nothing of speed")
    parser.add_argument("--list", action="store_true", help="show the commands and run nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda; with --tiny cpu")
    parser.add_argument(
        "--engine-set",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="a setting, which names its files and rows",
    )
    parser.add_argument(
        "--seconds", type=duration, default=math.inf, help="start no model that should take longer than left"
    )
    parser.add_argument(
        "--model-seconds", type=duration, default=120.0, help="end a model's bench after so long"
    )
    parser.add_argument("--resume", action="store_true", help="only what the rows' file has nothing of")
    parser.add_argument("--profiles", action="store_true", help="of decode steps, behind each model's bench")
    parser.add_argument("--one-by-one", action="store_true", help="each model compiles in its own start")
    parser.add_argument("--work", type=Path, default=Path("var/benchmarks"), help="the models' results")
    parser.add_argument("--output", type=Path, help="the rows; default: benchmarks/results")
    return parser


def _document(parser: argparse.ArgumentParser, output: Path) -> dict[str, Any]:
    try:
        document = read_document(output)
    except ValueError as error:
        parser.error(f"argument --output: {error}")
    if "model" in document:
        parser.error(f"argument --output: {output} has rows of {document['model']} alone; name another")
    return document


def main(argv: Sequence[str]) -> int:
    """Run the models that were asked for, then write the rows; returns the exit code."""
    begun_s = time.monotonic()
    parser = _parser()
    arguments = parser.parse_args(argv)
    arguments.device = arguments.device or ("cpu" if arguments.tiny else "cuda")
    # A toy's results lie apart: rows are made of all that is found.
    work = arguments.work.absolute() / ("tiny" if arguments.tiny else "")
    place = work if arguments.tiny else RESULTS
    size = "tiny" if arguments.tiny else "h200"
    output = arguments.output or place / f"families_{size}{suffix(arguments.engine_set)}.json"
    jobs = chosen_jobs(arguments, _document(parser, output))
    if arguments.list:
        for job in jobs:
            for _, line, _ in job.commands(arguments, work):
                print(" ".join(line))
        return 0
    check_device(parser, arguments.device)
    for option, file in (("--work", work / "result"), ("--output", output)):
        if reason := unwritable_reason(file):
            parser.error(f"argument {option}: {reason}")
    with orderly_end():
        failures = run_all(jobs, arguments, work, output, begun_s + arguments.seconds)
    if output.exists():
        show_rows(output)
    if failures:
        print(f"FAILED: {'; '.join(f'{name}: {reason}' for name, reason in failures.items())}")
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
