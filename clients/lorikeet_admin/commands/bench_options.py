"""Options that `lorikeet bench engine`, `serve` and `profile` share, and what they mean together."""

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from lorikeet_admin.bench_loop import orderly_end
from lorikeet_bench.engine.plan import EnginePlan
from lorikeet_bench.load.arrivals import Arrivals, ClosedLoop, OpenLoop, Pace
from lorikeet_bench.load.generated_adapters import AdapterShape, parse_sites
from lorikeet_bench.load.lengths import LengthRange, LoadError, RecordedRequest, read_requests
from lorikeet_bench.load.mix import AdapterMix
from lorikeet_bench.load.plan import LoadPlan
from lorikeet_bench.load.rig_tokens import rig_shape
from lorikeet_bench.load.sweep import Sweep
from lorikeet_bench.model_shape import write_model_shape
from lorikeet_bench.rigs import RigShape, write_copy_base

ModelDir = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, help="The model; or give --shape, or --rig.")
]
ProfiledModelDir = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, help="The model; or give --shape.")
]
Shape = Annotated[
    str, typer.Option(help="A released model's shape with random weights, e.g. gpt-oss-20b, qwen3-30b-a3b.")
]
ShapeSet = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=JSON", help="With --shape: another value in its config.json; repeatable."),
]
Rig = Annotated[
    bool, typer.Option("--rig", help="A tiny model whose every token is known in advance, and is judged.")
]
LoadFormat = Annotated[str, typer.Option(help="auto or dummy; default: dummy with --shape.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
EngineSet = Annotated[
    list[str] | None,
    typer.Option("--engine-set", metavar="KEY=JSON", help="Another setting of the engine; repeatable."),
]
Concurrency = Annotated[str, typer.Option(help="Requests open at a time; several with commas: a sweep.")]
Rate = Annotated[str, typer.Option(help="Requests a second, instead of --concurrency; several with commas.")]
Arrival = Annotated[Pace, typer.Option("--arrivals", help="With --rate: how requests are spaced.")]
Burst = Annotated[int, typer.Option(min=1, help="With --arrivals burst: requests sent at once.")]
Adapters = Annotated[str, typer.Option(help="Adapters that requests name; several with commas: a sweep.")]
ServedAdapters = Annotated[
    str,
    typer.Option(
        help="Adapters that requests name; several with commas: a sweep. With --adapter: as many as it names."
    ),
]
Points = Annotated[
    str,
    typer.Option(
        metavar="CONCURRENCY:ADAPTERS,...",
        help="Instead of --concurrency and --adapters: these points of a sweep alone, e.g. 1:32,32:32.",
    ),
]
Rank = Annotated[int, typer.Option(min=1, help="Of the generated adapters.")]
Sites = Annotated[
    str,
    typer.Option(
        help="Where they have weights, with commas; default: in all attention, experts and MLPs of the model."
    ),
]
Mix = Annotated[str, typer.Option(help="round-robin, uniform or zipf:ALPHA.")]
BaseShare = Annotated[float, typer.Option(min=0, max=1, help="Share of requests to the base model.")]
InputTokens = Annotated[str, typer.Option(help="Prompt length: N, or LOW:HIGH for a uniform range.")]
OutputTokens = Annotated[str, typer.Option(help="Answer length, exactly; N or LOW:HIGH.")]
Lengths = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        help="JSONL of requests instead: input_tokens, output_tokens, and perhaps adapter and arrival_s.",
    ),
]
Requests = Annotated[
    int | None, typer.Option(min=1, help="Measured requests a point; default: 2 x concurrency, at least 3.")
]
Duration = Annotated[float | None, typer.Option(min=0.1, help="Seconds a point, instead of --requests.")]
WarmUp = Annotated[int | None, typer.Option(min=0, help="Requests before each point; default: concurrency.")]
Repeats = Annotated[int, typer.Option(min=1, help="Runs of each point, taking turns; medians are shown.")]
Seed = Annotated[int, typer.Option(min=0, help="Of prompts, lengths, adapters and arrivals.")]
OwnSlots = Annotated[
    bool,
    typer.Option(
        "--own-slots/--shared-slots",
        help="A server for each number of adapters, with as many slots; else one that has them all.",
    ),
]
ProbeSteps = Annotated[
    int, typer.Option(min=0, help="Decode steps a point whose routing is looked at, after the timing.")
]
RoutingFloor = Annotated[
    float | None,
    typer.Option(
        min=0, max=1, help="Least share of evenly routed experts, or the run is void; default: 0.95 if dummy."
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", dir_okay=False, help="Write the whole result here as JSON.")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", dir_okay=False, help="Draw tokens/s here: .svg, .png or .pdf.")
]
DataDir = Annotated[
    Path | None,
    typer.Option(file_okay=False, help="For generated models, adapters and logs; default: a new one."),
]

_ROUTING_FLOOR = 0.95


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a command line says of its load; fields are the options."""

    concurrency: str = "1"
    rate: str = ""
    arrivals: Pace = Pace.POISSON
    burst: int = 8
    adapters: str = "0"
    mix: str = "round-robin"
    base_share: float = 0.0
    input_tokens: str = "1600"
    output_tokens: str = "600"
    lengths: Path | None = None
    requests: int | None = None
    duration: float | None = None
    warm_up: int | None = None
    repeats: int = 1
    seed: int = 1
    points: str = ""

    def sweep(self) -> Sweep:
        """The points.

        Raises:
            LoadError: the options do not go together; the message says what to change.
        """
        if self.points:
            return self._chosen(_pairs(self.points))
        recorded = read_requests(self.lengths) if self.lengths else ()
        arrivals = self._arrivals(recorded)
        requests = self.requests
        if arrivals and isinstance(arrivals[0], OpenLoop) and arrivals[0].pace is Pace.RECORDED:
            requests = requests or len(recorded)
        if requests is not None and self.duration is not None:
            raise LoadError("give one of --requests and --duration")
        counts = _numbers(self.adapters, "--adapters")
        template = LoadPlan(
            arrivals=ClosedLoop(1),
            num_adapters=max(counts),
            mix=AdapterMix.parse(self.mix, self.base_share),
            input_tokens=LengthRange.parse(self.input_tokens, "--input-tokens"),
            output_tokens=LengthRange.parse(self.output_tokens, "--output-tokens"),
            recorded=recorded,
            num_requests=None if self.duration else 1,
            duration_s=self.duration,
            seed=self.seed,
        )
        return Sweep(template, arrivals, counts, requests, self.warm_up, self.repeats)

    def loads(self) -> list[tuple[int, int]]:
        """Concurrency and adapters of each point of a closed loop, in the sweep's order."""
        plans = self.sweep().plans()
        return [
            (plan.arrivals.concurrency, plan.num_adapters)
            for plan in plans
            if isinstance(plan.arrivals, ClosedLoop)
        ]

    def _chosen(self, pairs: Sequence[tuple[int, int]]) -> Sweep:
        concurrency, adapters = (",".join(dict.fromkeys(map(str, part))) for part in zip(*pairs, strict=True))
        whole = replace(self, points="", concurrency=concurrency, adapters=adapters).sweep()
        return replace(whole, chosen=frozenset(pairs))

    def described(self) -> dict[str, Any]:
        """As it goes into a result."""
        return {**asdict(self), "lengths": None if self.lengths is None else self.lengths.name}

    def _arrivals(self, recorded: Sequence[RecordedRequest]) -> tuple[Arrivals, ...]:
        if self.arrivals is Pace.RECORDED:
            if not recorded:
                raise LoadError("--arrivals recorded needs --lengths with arrival_s")
            return (OpenLoop(0.0, Pace.RECORDED),)
        if not self.rate:
            counts = _numbers(self.concurrency, "--concurrency")
            if min(counts) < 1:
                raise LoadError("--concurrency must be at least 1")
            return tuple(ClosedLoop(count) for count in counts)
        try:
            rates = [float(part) for part in self.rate.split(",")]
        except ValueError as error:
            raise LoadError(f"--rate {self.rate!r} is no list of numbers, e.g. 2,4,8") from error
        return tuple(OpenLoop(rate, self.arrivals, self.burst) for rate in rates)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What a command line says of the model that it starts; `rig` is None where that is no option."""

    model_dir: Path | None
    shape: str
    shape_set: Sequence[str]
    rig: bool | None
    load_format: str
    device: str
    dtype: str
    engine_set: Sequence[str]

    def materialize(self, directory: Path, num_adapters: int) -> tuple[Path, str, RigShape | None]:
        """Model directory, load format and, for a rig, its sizes; writes what is generated to `directory`.

        Raises:
            LoadError: not exactly one model is named, or there is no such shape.
        """
        if sum((self.model_dir is not None, bool(self.shape), bool(self.rig))) != 1:
            choices = "--model-dir and --shape" if self.rig is None else "--model-dir, --shape and --rig"
            raise LoadError(f"give exactly one of {choices}")
        if self.model_dir is not None:
            return self.model_dir, self.load_format or "auto", None
        if self.rig:
            shape = rig_shape(num_adapters)
            return write_copy_base(directory / "model", shape), "auto", shape
        try:
            path = write_model_shape(
                directory / self.shape, self.shape, settings(self.shape_set, "--shape-set")
            )
        except ValueError as error:
            raise LoadError(str(error)) from error
        return path, self.load_format or "dummy", None

    def plans(
        self, directory: Path, sweep: Sweep, adapters: AdapterShape, *, own_slots: bool
    ) -> tuple[str, list[tuple[EnginePlan, Sweep]]]:
        """The load format, and the engines to start, each with its part of the sweep.

        Raises:
            LoadError: as `materialize`, or an option is no KEY=JSON.
        """
        path, weights, rig = self.materialize(directory, max(sweep.adapters))
        groups = [(count,) for count in sweep.adapters] if own_slots else [sweep.adapters]
        plan = EnginePlan(
            model_dir=path,
            directory=directory,
            load_format=weights,
            device=self.device,
            dtype=self.dtype,
            adapters=adapters,
            most_open=max(point.most_open or 0 for point in sweep.plans()) or None,
            longest=sweep.template.longest,
            rig=rig,
            overrides=settings(self.engine_set, "--engine-set"),
        )
        return weights, [
            (replace(plan, slots=max(counts)), replace(sweep, adapters=counts)) for counts in groups
        ]


def adapter_shape(rank: int, sites: str) -> AdapterShape:
    """The generated adapters; no sites: the model's."""
    return AdapterShape(rank, parse_sites(sites))


def running_adapters(given: str, num_names: int, *, is_given: bool, upload: bool) -> str:
    """How many adapters a running node is asked for: as many as are named, where nothing else is said.

    Raises:
        LoadError: adapters are named or wanted, and none would be asked for; or the other way round.
    """
    if not is_given and num_names:
        return str(num_names)
    most = max(_numbers(given, "--adapters"))
    if upload and not most:
        raise LoadError("--upload makes as many adapters as --adapters says, e.g. --adapters 8")
    if not upload and most > num_names:
        raise LoadError(
            f"--adapters {most}, but {num_names} are named: name them by --adapter, or make them by --upload"
        )
    if num_names and not most:
        raise LoadError("--adapter names adapters that --adapters 0 never asks for")
    return given


def settings(items: Sequence[str], option: str) -> dict[str, Any]:
    """KEY=JSON pairs; a value that is no JSON is a string."""
    found: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise LoadError(f"{option} {item!r} is not KEY=VALUE")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


@contextmanager
def wrong_usage() -> Generator[None]:
    """A load that cannot be made as asked is the command line's fault."""
    try:
        yield
    except LoadError as error:
        raise typer.BadParameter(str(error)) from error


def _numbers(text: str, option: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise LoadError(f"{option} {text!r} is no list of numbers, e.g. 1,16,32")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _pairs(text: str) -> list[tuple[int, int]]:
    """CONCURRENCY:ADAPTERS, several with commas."""
    pairs = [pair.split(":") for pair in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise LoadError(f"--points {text!r} is no list of CONCURRENCY:ADAPTERS, e.g. 1:32,32:32")
    numbers = [(_number(pair[0]), _number(pair[1])) for pair in pairs]
    if not all(concurrency for concurrency, _ in numbers):
        raise LoadError(f"--points {text!r}: a concurrency must be at least 1")
    return numbers


def _number(text: str) -> int:
    (number,) = _numbers(text, "--points")
    return number


def routing_floor(given: float | None, load_format: str) -> float | None:
    """The least share of evenly routed experts. A checkpoint's own routing is as it is, and not judged."""
    return _ROUTING_FLOOR if given is None and load_format == "dummy" else given


@contextmanager
def working_directory(given: Path | None) -> Generator[Path]:
    """The given directory, or a new one that goes away."""
    if given is not None:
        try:
            given.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(
                f"cannot write to {given}: {error.strerror}", param_hint="--data-dir"
            ) from error
        with orderly_end():
            yield given.absolute()
        return
    with orderly_end(), TemporaryDirectory(prefix="lorikeet-bench-") as directory:
        yield Path(directory)
