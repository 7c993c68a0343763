"""`lorikeet bench profile`: what decode steps are made of, beside what they must read."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from lorikeet_admin.bench_loop import run_bench
from lorikeet_admin.commands import bench_options as options
from lorikeet_admin.commands.bench_options import LoadOptions, ModelOptions
from lorikeet_admin.commands.bench_usage import check_results, refuse_ignored
from lorikeet_admin.late_import import late_import
from lorikeet_admin.output import Output
from lorikeet_admin.profile_report import show_profile
from lorikeet_bench.load.lengths import LoadError
from lorikeet_bench.machine import describe_machine


def profile(
    context: typer.Context,
    *,
    model_dir: options.ProfiledModelDir = None,
    shape: options.Shape = "",
    shape_set: options.ShapeSet = None,
    load_format: options.LoadFormat = "",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    engine_set: options.EngineSet = None,
    concurrency: options.Concurrency = "1",
    adapters: options.Adapters = "0",
    rank: options.Rank = 32,
    sites: options.Sites = "",
    input_tokens: Annotated[int, typer.Option(min=1, help="Their prompts' length.")] = 1600,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps that are profiled.")] = 20,
    json_file: options.JsonFile = None,
    data_dir: options.DataDir = None,
) -> None:
    """Profile decode steps of an engine, every kernel with its time, calls and the gaps between them.

    On a GPU through CUPTI, kernels inside graphs one by one, and beside each part of the model its floor:
    what it must read at 4.3 TB/s, an H200's copy bandwidth. On a CPU the operators alone. Several loads are
    profiled on one engine, which has slots for the most adapters.
    """
    with options.wrong_usage():
        refuse_ignored(context)
    check_results(json_file)
    output = Output(as_json=False)
    engine_config = late_import("lorikeet_bench.engine.settings:engine_config")
    floor_model = late_import("lorikeet_bench.engine.floors:FloorModel")
    output_tokens = late_import("lorikeet_bench.engine.profile:output_tokens")
    plan_dtype = late_import("lorikeet_bench.engine.settings:plan_dtype")
    profile_decodes = late_import("lorikeet_bench.engine.profile:profile_decodes")
    profiled_point = late_import("lorikeet_bench.engine.decode_profile:ProfiledPoint")
    load = LoadOptions(concurrency=concurrency, adapters=adapters, input_tokens=str(input_tokens))
    model = ModelOptions(
        model_dir=model_dir,
        shape=shape,
        shape_set=shape_set or (),
        rig=None,
        load_format=load_format,
        device=device,
        dtype=dtype,
        engine_set=engine_set or (),
    )
    with options.working_directory(data_dir) as directory:
        with options.wrong_usage():
            made = options.adapter_shape(rank, sites)
            loads = load.loads()
            most = max(rows for rows, _ in loads)
            longest = replace(load, output_tokens=str(output_tokens(most, input_tokens, steps)))
            _, ((plan, _),) = model.plans(directory, longest.sweep(), made, own_slots=False)
            engine_config(plan)
        try:
            profiles = run_bench(profile_decodes(plan, loads, input_tokens=input_tokens, num_steps=steps))
        except LoadError as error:
            raise output.fail(str(error)) from error
        floors = floor_model.read(plan.model_dir, plan_dtype(plan), made)
    points = [
        profiled_point.of(rows, count, floors.decode(rows, count, input_tokens), found)
        for (rows, count), found in zip(loads, profiles, strict=True)
    ]
    if json_file is not None:
        write_profile(json_file, {"machine": describe_machine("torch", "triton"), "profiles": points})
    for point in points:
        show_profile(output.console, point)


def write_profile(path: Path, document: dict[str, object]) -> None:
    """As JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
