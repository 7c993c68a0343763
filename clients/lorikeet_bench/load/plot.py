"""Tokens a second against adapters or load, one line for each of the other."""

from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

from lorikeet_bench.load.lengths import LoadError
from lorikeet_bench.load.result import BenchResult
from lorikeet_bench.load.words import counted


def check_plot(path: Path) -> None:
    """Ask whether `plot_points` can draw to `path`; imports what draws.

    Raises:
        LoadError: matplotlib is not installed, or does not know the format.
    """
    try:
        bases: Any = import_module("matplotlib.backend_bases")
    except ImportError as error:
        raise LoadError("--plot needs matplotlib: pip install 'lorikeet[bench]'") from error
    known = sorted(bases.FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in known:
        raise LoadError(f"--plot {path}: its name must end in one of .{', .'.join(known)}")


def plot_points(result: BenchResult, path: Path) -> None:
    """Draw to `path`, whose suffix names the format.

    Raises:
        LoadError: matplotlib is not installed, or does not know the format.
    """
    try:
        figures: Any = import_module("matplotlib.figure")
    except ImportError as error:
        raise LoadError("--plot needs matplotlib: pip install 'lorikeet[bench]'") from error
    over_adapters = len({point.adapters for point in result.points}) > 1
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for point in result.points:
        load = point.concurrency or point.rate or 0.0
        load_name = f"concurrency {point.concurrency}" if point.concurrency else f"{point.rate:g} requests/s"
        x, name = (point.adapters, load_name) if over_adapters else (load, counted(point.adapters, "adapter"))
        lines[name].append((x, point.median.tokens_per_s))
    # Without pyplot: no display is looked for, and nothing global is left behind.
    figure = figures.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set_xlabel("adapters" if over_adapters else "load")
    axes.set_ylabel("output tokens/s")
    axes.set_ylim(bottom=0)
    where = ", ".join(filter(None, (result.servers[0].model, result.servers[0].device)))
    axes.set_title(f"{where}: at the {result.boundary}")
    axes.legend()
    axes.grid(visible=True, alpha=0.3)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise LoadError(f"--plot {path}: {error}") from error
