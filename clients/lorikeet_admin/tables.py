"""Tables that more than one command draws."""

from collections.abc import Iterable

from rich import box
from rich.table import Table

from lorikeet_admin.output import short_digest, size
from lorikeet_client import Placement, ResidencyState, UploadReport
from lorikeet_contract.names import InvalidNameError, parse_reference


def plain_table(*columns: str) -> Table:
    """A table without colours or frames, readable in logs too."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def short_name(resource: str) -> str:
    """The form people type, where the service sent a resource name."""
    try:
        return parse_reference(resource).name.short
    except InvalidNameError:
        return resource


def placement_table(placements: Iterable[Placement]) -> Table:
    """Where adapters' weights are, and where they should be if that differs."""
    table = plain_table("adapter", "revision", "node", "state", "pinned", "size", "leases", "")
    for item in placements:
        settled = item.desired in {item.state, ResidencyState.UNSPECIFIED}
        table.add_row(
            short_name(item.revision),
            short_digest(item.revision.rpartition("/")[2]),
            item.node,
            item.state if settled else f"{item.state} (wanted: {item.desired})",
            "yes" if item.pinned else "",
            size(item.bytes),
            str(item.leases),
            item.failure,
        )
    return table


def report_table(report: UploadReport) -> Table:
    """What the tensors of an upload were matched to: equal sites of several layers share a row."""
    rows: dict[tuple[str, int, str], list[int | None]] = {}
    totals: dict[tuple[str, int, str], tuple[int, int]] = {}
    for site in report.sites:
        name = site.site if site.layer is None else site.site.removeprefix(f"layers.{site.layer}.")
        key = (name, site.rank, site.layout)
        rows.setdefault(key, []).append(site.layer)
        tensors, num_bytes = totals.get(key, (0, 0))
        totals[key] = (tensors + site.tensors, num_bytes + site.bytes)
    table = plain_table("site", "layers", "rank", "layout", "tensors", "size")
    for (name, rank, layout), layers in rows.items():
        tensors, num_bytes = totals[name, rank, layout]
        table.add_row(name, layer_ranges(layers), str(rank), layout, str(tensors), size(num_bytes))
    return table


def layer_ranges(layers: Iterable[int | None]) -> str:
    """Layer numbers as ranges: 0-3, 5; empty for sites outside the layers."""
    ranges: list[list[int]] = []
    for layer in sorted(layer for layer in layers if layer is not None):
        if ranges and layer <= ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
