"""Refuses at the beginning what would have no effect on a bench, or could not be written at its end."""

from collections.abc import Iterable
from pathlib import Path

import typer

from lorikeet_bench.load.arrivals import Pace
from lorikeet_bench.load.lengths import LoadError
from lorikeet_bench.load.plot import check_plot
from lorikeet_bench.writable import unwritable_reason

_OWN_SERVER = (
    *("model_dir", "shape", "shape_set", "rig", "load_format", "device", "dtype", "engine_set"),
    "own_slots",
)


def refuse_ignored(context: typer.Context) -> None:
    """Refuse options of `bench engine`, `serve` or `profile` that others on the line would silence.

    Raises:
        LoadError: there are some; the message names them and what they would need.
    """
    given = given_options(context)
    values = context.params

    def refuse(names: Iterable[str], why: str) -> None:
        if found := [_flag(name) for name in names if name in given]:
            raise LoadError(f"{' and '.join(found)} {why}")

    if values.get("running"):
        refuse(_OWN_SERVER, "would have no effect with --running: that server is as it is")
    else:
        refuse(("names", "upload"), "would have no effect without --running")
    if not values.get("upload"):
        refuse(("tenant",), "would have no effect without --upload")
        if values.get("running"):
            refuse(("rank", "sites"), "would have no effect without --upload")
    elif "names" in given:
        raise LoadError("give one of --adapter, for adapters that are there, and --upload")
    if values.get("rig"):
        refuse(
            ("rank", "sites", "load_format"), "would have no effect with --rig: it has adapters of its own"
        )
    if not values.get("shape"):
        refuse(("shape_set",), "would have no effect without --shape")
    if values.get("points"):
        refuse(("concurrency", "adapters", "rate", "arrivals"), "would have no effect with --points")
    if values.get("rate"):
        refuse(("concurrency",), "would have no effect with --rate: give one of them")
    if values.get("arrivals") is Pace.RECORDED:
        refuse(("rate", "concurrency"), "would have no effect with --arrivals recorded")
    elif not values.get("rate"):
        refuse(("arrivals",), "would have no effect without --rate")
    if values.get("arrivals") is not Pace.BURST:
        refuse(("burst",), "would have no effect without --arrivals burst")
    if values.get("lengths"):
        refuse(("input_tokens", "output_tokens"), "would have no effect with --lengths")


def given_options(context: typer.Context) -> frozenset[str]:
    """Names of the parameters that the command line itself sets."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source and source.name == "COMMANDLINE")


def check_results(json_file: Path | None, plot_file: Path | None = None) -> None:
    """Try whether the result can be written where it is wanted; makes directories that are missing.

    Raises:
        BadParameter: it cannot, or there is no such kind of plot.
    """
    check_file(json_file, "--json")
    check_file(plot_file, "--plot")
    if plot_file is not None:
        try:
            check_plot(plot_file)
        except LoadError as error:
            raise typer.BadParameter(str(error)) from error


def check_file(path: Path | None, option: str) -> None:
    """Try whether `path` can be written; makes directories that are missing.

    Raises:
        BadParameter: it cannot.
    """
    if path is not None and (reason := unwritable_reason(path)):
        raise typer.BadParameter(reason, param_hint=option)


def _flag(name: str) -> str:
    return "--adapter" if name == "names" else f"--{name.replace('_', '-')}"
