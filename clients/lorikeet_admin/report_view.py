"""What an upload was found to hold and what a probe found out, for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from lorikeet_admin.output import size
from lorikeet_admin.tables import plain_table, report_table
from lorikeet_client import Probe, ProbeVerdict, Revision, SiteCoverage, TensorGroup, UploadReport

_MAX_VALUES = 4
_MAX_NEUTRAL = 20


def show_report(console: Console, report: UploadReport, *, is_verbose: bool) -> None:
    """One line for each kind of site; with `is_verbose` one for each group of tensors as well."""
    # A manager of an earlier release tells only the sites.
    console.print(_coverage_table(report.coverage) if report.coverage else report_table(report))
    if missing := [kind.site for kind in report.coverage if not kind.tensors]:
        console.print(f"no adapter on: {', '.join(missing)}")
    if is_verbose:
        console.print(_tensor_table(report.tensors))
    else:
        _show_neutral(console, report)
    in_files = f"; {size(report.file_bytes)} in the files" if report.file_bytes else ""
    console.print(f"{_counts(report)}{in_files}")
    if report.tensors_not_listed:
        console.print(
            f"{report.tensors_not_listed} tensors are not named: their names have too little in common"
        )
    for warning in report.warnings:
        console.print(f"warning: {warning}")


def _counts(report: UploadReport) -> str:
    """Tensors may be placed and change nothing, or have no place because they change nothing."""
    placed = sum(group.count for group in report.tensors if group.site and group.neutral)
    used = f"{report.tensors_used} of {report.tensors_total} tensors used"
    if not placed:
        return f"{used}, {report.tensors_neutral} without effect"
    at_least = "at least " if report.tensors_not_listed else ""
    left_out = (
        f"; {report.tensors_neutral} more, without effect too, left out" if report.tensors_neutral else ""
    )
    return f"{used}, {at_least}{placed} of them without effect{left_out}"


def show_probe(console: Console, revision: Revision) -> None:
    """What a node found out about a revision, in one line."""
    if revision.probe is None:
        console.print("not probed yet: `lorikeet adapters probe NAME` compares it with the base model now")
        return
    probe = revision.probe
    when = f" at {probe.time:%Y-%m-%d %H:%M:%S} UTC" if probe.time else ""
    console.print(f"probe on {probe.node}{when}: {probe_text(probe)}")


def probe_text(probe: Probe) -> str:
    """The verdict with its figures."""
    match probe.verdict:
        case ProbeVerdict.CHANGES:
            return (
                f"changes log-probabilities by up to {probe.max_difference:.3g} (rounding: {probe.noise:.2g})"
                f", the most likely token at {probe.top1_changes} of {probe.positions} places"
            )
        case ProbeVerdict.CHANGES_NOTHING:
            return (
                f"CHANGES NOTHING: no log-probability at {probe.positions} places differs from the base "
                f"model's by more than its own runs do ({probe.noise:.2g})"
            )
        case ProbeVerdict.NOT_FINITE:
            return "NOT FINITE: with this adapter the model's output is NaN or infinite"
        case ProbeVerdict.UNSPECIFIED:
            return "has a verdict that this command does not know: upgrade it"


def probe_word(probe: Probe | None) -> str:
    """The verdict alone, for lists."""
    return probe.verdict.value.replace("_", " ") if probe else ""


def _coverage_table(coverage: Sequence[SiteCoverage]) -> Table:
    table = plain_table("site", "layers", "without", "experts", "rank", "scale", "layout", "tensors", "size")
    for kind in coverage:
        if not kind.tensors:
            continue
        slices = f" ({', '.join(kind.slices)})" if kind.slices else ""
        table.add_row(
            kind.site + slices,
            kind.layers,
            kind.layers_without,
            _experts(kind),
            _values([str(rank) for rank in kind.ranks]),
            _values([f"{scale:.6g}" for scale in kind.scales]),
            ", ".join(kind.layouts),
            str(kind.tensors),
            size(kind.bytes),
        )
    return table


def _experts(kind: SiteCoverage) -> str:
    if not kind.num_experts:
        return ""
    few, many = kind.min_experts, kind.max_experts
    return f"{few if few == many else f'{few}-{many}'} of {kind.num_experts}"


def _values(texts: Sequence[str]) -> str:
    """All of a few, the ends of many; they come in ascending order."""
    if len(texts) <= _MAX_VALUES:
        return ", ".join(texts)
    return f"{texts[0]} to {texts[-1]} ({len(texts)} values)"


def _tensor_table(groups: Sequence[TensorGroup]) -> Table:
    table = plain_table("tensors", "count", "shape", "dtype", "site", "layout", "rank", "scale", "size", "")
    for group in groups:
        site = f"{group.site} ({group.slice})" if group.slice else group.site
        table.add_row(
            tensor_names(group),
            str(group.count),
            " x ".join(map(str, group.shape)),
            group.dtype,
            site,
            group.layout,
            str(group.rank) if group.site else "",
            f"{group.scale:.6g} = {group.scaling}" if group.site else "",
            size(group.bytes),
            group.neutral,
        )
    return table


def tensor_names(group: TensorGroup) -> str:
    """The names of a group, ranges in braces where numbers stood."""
    pieces = group.key.split("*")
    if len(pieces) != len(group.indices) + 1:
        return group.key
    rest = (f"{{{text}}}{piece}" for text, piece in zip(group.indices, pieces[1:], strict=True))
    return pieces[0] + "".join(rest)


def _show_neutral(console: Console, report: UploadReport) -> None:
    neutral = [group for group in report.tensors if group.neutral]
    for group in neutral[:_MAX_NEUTRAL]:
        console.print(f"without effect: {tensor_names(group)}: {group.neutral}")
    if (more := len(neutral) - _MAX_NEUTRAL) > 0:
        console.print(f"and {more} more lines of the kind: --verbose shows them")
