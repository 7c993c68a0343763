"""`lorikeet bench serve`: a node over gRPC, one that runs or one of its own."""

from typing import Annotated

import grpc.aio
import typer

from lorikeet_admin.commands import bench_options as options
from lorikeet_admin.commands.bench_options import LoadOptions, ModelOptions
from lorikeet_admin.commands.bench_usage import check_results, given_options, refuse_ignored
from lorikeet_admin.late_import import late_import
from lorikeet_admin.load_report import report
from lorikeet_admin.local_stack import StackError
from lorikeet_admin.output import Output
from lorikeet_bench.load.arrivals import Pace
from lorikeet_bench.load.lengths import LoadError
from lorikeet_bench.load.result import BenchResult
from lorikeet_bench.machine import describe_machine


def serve(
    context: typer.Context,
    *,
    running: Annotated[
        bool, typer.Option("--running", help="Load the node that --inference and --token name.")
    ] = False,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            help="With --running: an adapter that is there, e.g. demo/pirate; repeatable, in order.",
        ),
    ] = None,
    upload: Annotated[
        bool,
        typer.Option("--upload", help="With --running: push generated adapters through --manager."),
    ] = False,
    tenant: Annotated[str, typer.Option(help="With --upload: the token's tenant.")] = "demo",
    text: Annotated[bool, typer.Option("--text", help="Prompts as text instead of token ids.")] = False,
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
    adapters: options.ServedAdapters = "0",
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
    """Send a load over gRPC and stream the answers, to a node of its own or to one that runs.

    A node of its own is one inference service without a manager: the bench names the generated adapters to
    it. Otherwise as `bench engine`; which revision answered is compared as well.
    """
    with options.wrong_usage():
        refuse_ignored(context)
        if running:
            adapters = options.running_adapters(
                adapters, len(names or ()), is_given="adapters" in given_options(context), upload=upload
            )
    check_results(json_file, plot_file)
    load = LoadOptions(
        *(concurrency, rate, arrivals, burst, adapters, mix, base_share, input_tokens, output_tokens),
        *(lengths, requests, duration, warm_up, repeats, seed),
    )
    model = ModelOptions(
        *(model_dir, shape, shape_set or (), rig, load_format, device, dtype, engine_set or ())
    )
    output = Output(as_json=False)
    node_flags = late_import("lorikeet_bench.engine.settings:node_flags")
    serve_bench = late_import("lorikeet_admin.serve_bench:ServeBench")

    with options.working_directory(data_dir) as directory, output.reported_errors():
        with options.wrong_usage():
            sweep, made = load.sweep(), options.adapter_shape(rank, sites)
            weights, plans = ("", []) if running else model.plans(directory, sweep, made, own_slots=own_slots)
            for plan, _ in plans:
                node_flags(plan)
        bench = serve_bench(directory, made, text, probe_steps, output)
        try:
            if running:
                bench.on_running(context.obj, sweep, names or (), tenant if upload else "")
            for plan, part in plans:
                bench.on_own_node(plan, part)
        except (LoadError, StackError) as error:
            raise output.fail(str(error)) from error
        except grpc.aio.AioRpcError as error:
            raise output.fail(f"{error.code().name}: {error.details()}") from error
    result = BenchResult(
        boundary="gRPC stream",
        machine=describe_machine("grpcio", "torch", "triton"),
        load={
            **load.described(),
            "rank": rank,
            "sites": sites,
            "shape": shape,
            "shape_set": shape_set,
            "text": text,
        },
        servers=tuple(bench.servers),
        points=tuple(bench.points),
        routing_floor=options.routing_floor(routing_floor, weights),
    )
    report(result, json_file, plot_file, output)
