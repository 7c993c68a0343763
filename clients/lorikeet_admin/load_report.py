"""A load's result for people's eyes, as JSON, and as a plot."""

from pathlib import Path

import msgspec
import typer

from lorikeet_admin.exits import ExitCode
from lorikeet_admin.output import Output, size
from lorikeet_admin.tables import plain_table
from lorikeet_bench.load.lengths import LoadError
from lorikeet_bench.load.metrics import LoadSummary
from lorikeet_bench.load.plot import plot_points
from lorikeet_bench.load.result import BenchResult, PointResult
from lorikeet_bench.load.words import counted

_BURST_MARK = " (bursts)"


def progress_text(name: str, summary: LoadSummary) -> str:
    """One line after each run of a point."""
    return (
        f"{name}: {summary.tokens_per_s:.0f} tokens/s, TTFT {summary.ttft_ms.mean:.0f} ms, "
        f"{summary.duration_s:.1f} s"
    )


def report(result: BenchResult, json_file: Path | None, plot_file: Path | None, output: Output) -> None:
    """Show a result and write its files; ends with FAILED where its figures must not be used."""
    if json_file is not None:
        document = {
            "passed": not result.failures,
            "failures": result.failures,
            "warnings": result.warnings,
            **msgspec.to_builtins(result),
        }
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    show(result, output)
    if plot_file is not None:
        try:
            plot_points(result, plot_file)
        except LoadError as error:
            raise output.fail(str(error)) from error
    if result.failures:
        raise typer.Exit(ExitCode.FAILED)


def show(result: BenchResult, output: Output) -> None:
    """The tables, and what speaks against believing them."""
    console = output.console
    for server in result.servers:
        started = "" if server.startup_s is None else f", ready after {server.startup_s:.1f} s"
        loaded = ""
        if server.adapter_load_s is not None:
            loaded = f", {counted(server.slots, 'adapter')} of {size(server.adapter_bytes)}"
            loaded += f" loaded in {server.adapter_load_s:.2f} s"
        place = f" on {server.device}" if server.device else ""
        console.print(f"{server.model} in {server.dtype}{place}{started}{loaded}")
        if server.startup_phases:
            parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in server.startup_phases.items())
            console.print(f"start-up, s: {parts}")
    runs = len(result.points[0].repeats)
    console.print(
        f"timed at the {result.boundary}; {'one run' if runs == 1 else f'medians of {runs} runs'} a point"
    )
    rates = plain_table(
        *("point", "tokens/s", "requests/s", "decode tokens/s a request", "overall", "requests", "failed")
    )
    for point in result.points:
        rates.add_row(*_rates(point))
    console.print(rates)
    times = plain_table("point", "ms", "mean", "median", "p90", "p95", "p99", "max")
    for point in result.points:
        for word, values in (
            ("TTFT", point.median.ttft_ms),
            ("inter-token", point.median.inter_token_ms),
            ("end to end", point.median.end_to_end_ms),
        ):
            figures = (values.mean, values.median, values.p90, values.p95, values.p99, values.max)
            mark = _BURST_MARK if word == "inter-token" and point.came_in_bursts else ""
            times.add_row(point.name, word, *(f"{figure:.2f}{mark}" for figure in figures))
    console.print(times)
    routed = plain_table(
        "point", "rows a step", "experts a layer", "of even", "(expert, adapter) pairs", "even"
    )
    for point in result.points:
        if (found := point.routing) is not None:
            routed.add_row(
                point.name,
                f"{found.rows:.1f}",
                f"{found.experts:.2f}",
                f"{100 * found.share:.1f} % of {found.expected_experts:.2f}",
                f"{found.pairs:.2f}",
                f"{found.expected_pairs:.2f}",
            )
    if routed.row_count:
        console.print(routed)
        if result.routing_floor is None:
            console.print(
                "the routing is told, not judged: the rule that voids a run is for random weights; "
                "--routing-floor SHARE judges any"
            )
    cost = max(result.points, key=lambda point: point.median.generator.cpu_share).median.generator
    console.print(
        f"load generator, at its busiest: {100 * cost.cpu_share:.1f} % of this machine's CPU time "
        f"({cost.cpu_cores:.2f} cores), event loop {cost.lag_ms:.2f} ms late on average"
    )
    if checked := sum(point.checked_tokens for point in result.points):
        console.print(f"{checked} tokens compared with what each adapter must say")
    for warning in result.warnings:
        console.print(f"WARNING: {warning}")
    for failure in result.failures:
        console.print(f"FAIL: {failure}")


def _rates(point: PointResult) -> tuple[str, ...]:
    median = point.median
    return (
        point.name,
        f"{median.tokens_per_s:.1f}",
        f"{median.requests_per_s:.2f}",
        f"{median.decode_tokens_per_s.mean:.1f}{_BURST_MARK if point.came_in_bursts else ''}",
        f"{median.overall_tokens_per_s.mean:.1f}",
        str(sum(repeat.requests for repeat in point.repeats)),
        ", ".join(f"{count} {status}" for status, count in median.failures.items()) or "0",
    )
