"""Which output columns are fed by which A, described to the kernels."""

from dataclasses import dataclass

from lorikeet_kernels.dense.row_order import RowOrder, check_row_order


@dataclass(frozen=True, slots=True)
class PairLane:
    """A run of output columns fed by one A: `row` is where its rows of B start within the site."""

    site: int  # index into the launch's sites
    half: int  # which A, where the site has two
    column: int
    row: int
    width: int


def gate_up_lanes(num_columns: int, row_order: RowOrder) -> tuple[PairLane, ...]:
    """Gate and up side by side are two lanes; interleaved they are one, where a column's parity picks A."""
    check_row_order(row_order)
    if row_order == "interleaved":
        return (PairLane(0, 0, 0, 0, num_columns),)
    half = num_columns // 2
    return (PairLane(0, 0, 0, 0, half), PairLane(0, 1, half, half, half))


def site_lanes(out_features: tuple[int, ...], num_slices: tuple[int, ...]) -> tuple[PairLane, ...]:
    """Sites side by side, those with two slices as two lanes each."""
    lanes: list[PairLane] = []
    column = 0
    for site, (width, slices) in enumerate(zip(out_features, num_slices, strict=True)):
        part = width // slices
        lanes += [PairLane(site, i, column + i * part, i * part, part) for i in range(slices)]
        column += width
    return tuple(lanes)


def describe_lanes(lanes: tuple[PairLane, ...], block_n: int) -> tuple[tuple[tuple[int, ...], ...], int]:
    """What a kernel walks: (site, half, column, row, width, first tile, the site's rows); and the tiles."""
    described: list[tuple[int, ...]] = []
    first = 0
    for lane in lanes:
        site_rows = sum(other.width for other in lanes if other.site == lane.site)
        described.append((lane.site, lane.half, lane.column, lane.row, lane.width, first, site_rows))
        first += -(-lane.width // block_n)
    return tuple(described), first
