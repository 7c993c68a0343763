"""`lorikeet bench engine`: the engine by itself, at the boundary at which vLLM was measured."""

import typer

from lorikeet_admin.bench_loop import run_bench
from lorikeet_admin.commands import bench_options as options
from lorikeet_admin.commands.bench_options import LoadOptions, ModelOptions
from lorikeet_admin.commands.bench_usage import check_results, refuse_ignored
from lorikeet_admin.late_import import late_import
from lorikeet_admin.load_report import progress_text, report
from lorikeet_admin.output import Output
from lorikeet_bench.load.arrivals import Pace
from lorikeet_bench.load.lengths import LoadError
from lorikeet_bench.load.metrics import LoadSummary
from lorikeet_bench.load.result import BenchResult, PointResult, ServerFacts
from lorikeet_bench.machine import describe_machine


def engine(
    context: typer.Context,
    *,
    model_dir: options.ModelDir = None,
    shape: options.Shape = "",
    shape_set: options.ShapeSet = None,
    rig: options.Rig = False,
    load_format: options.LoadFormat = "",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    engine_set: options.EngineSet = None,
    concurrency: options.Concurrency = "1",
    rate: options.Rate = "",
    arrivals: options.Arrival = Pace.POISSON,
    burst: options.Burst = 8,
    adapters: options.Adapters = "0",
    points: options.Points = "",
    rank: options.Rank = 32,
    sites: options.Sites = "",
    mix: options.Mix = "round-robin",
    base_share: options.BaseShare = 0.0,
    input_tokens: options.InputTokens = "1600",
    output_tokens: options.OutputTokens = "600",
    lengths: options.Lengths = None,
    requests: options.Requests = None,
    duration: options.Duration = None,
    warm_up: options.WarmUp = None,
    repeats: options.Repeats = 1,
    seed: options.Seed = 1,
    own_slots: options.OwnSlots = False,
    probe_steps: options.ProbeSteps = 8,
    routing_floor: options.RoutingFloor = None,
    json_file: options.JsonFile = None,
    plot_file: options.PlotFile = None,
    data_dir: options.DataDir = None,
) -> None:
    """Start an engine, load generated adapters, and send it a load without gRPC and without text.

    Greedy requests of random token ids; the model's ends are ignored, and prefixes are not cached. Exit code
    1: a request failed, an answer was another's (with --rig every token is compared), or the routing read
    fewer experts than even routing would, which makes the figures void.
    """
    with options.wrong_usage():
        refuse_ignored(context)
    check_results(json_file, plot_file)
    output = Output(as_json=False)
    load = LoadOptions(
        *(concurrency, rate, arrivals, burst, adapters, mix, base_share, input_tokens, output_tokens),
        *(lengths, requests, duration, warm_up, repeats, seed, points),
    )
    model = ModelOptions(
        *(model_dir, shape, shape_set or (), rig, load_format, device, dtype, engine_set or ())
    )
    engine_config = late_import("lorikeet_bench.engine.settings:engine_config")
    run_engine_bench = late_import("lorikeet_bench.engine.run:run_engine_bench")

    def on_point(name: str, summary: LoadSummary) -> None:
        output.note(progress_text(name, summary))

    servers: list[ServerFacts] = []
    measured: list[PointResult] = []
    with options.working_directory(data_dir) as directory:
        with options.wrong_usage():
            sweep, made = load.sweep(), options.adapter_shape(rank, sites)
            weights, plans = model.plans(directory, sweep, made, own_slots=own_slots)
            for plan, _ in plans:
                engine_config(plan)
        for plan, part in plans:
            try:
                facts, found = run_bench(
                    run_engine_bench(plan, part, probe_steps=probe_steps, on_point=on_point)
                )
            except LoadError as error:
                raise output.fail(str(error)) from error
            servers.append(facts)
            measured.extend(found)
    result = BenchResult(
        boundary="engine client",
        machine=describe_machine("torch", "triton"),
        load={
            **load.described(),
            "rank": rank,
            "sites": sites,
            "shape": shape,
            "shape_set": shape_set,
        },
        servers=tuple(servers),
        points=tuple(measured),
        routing_floor=options.routing_floor(routing_floor, weights),
    )
    report(result, json_file, plot_file, output)
