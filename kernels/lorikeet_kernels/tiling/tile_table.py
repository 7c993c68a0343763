"""Measured tiles: one JSON file a device beside this one, named after it, read once."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from lorikeet_kernels.tiling.measured import MEASURED
from lorikeet_kernels.tiling.tile_config import OpShape

Table = TypeVar("Table")
FOLDER = Path(__file__).parent
NEAREST = 2.0  # an entry serves shapes with up to 4x fewer or more pairs (log2)


@dataclass(frozen=True, slots=True)
class TileEntry:
    """The fastest tiles seen for a stage ("pair", "segment", "shrink", "expand") of an op at one shape.

    `block_m` is 0 for "pair" and "segment". `us` is what was measured, for readers.
    """

    stage: str
    shape: OpShape
    block_m: int
    tiles: Mapping[str, Any]
    us: float


@dataclass(frozen=True, slots=True)
class TileTable:
    """All entries of a device; `device` is the name that torch reports, `measured` a date."""

    device: str
    measured: str
    entries: Sequence[TileEntry]
    # A start asks for some ten thousand shapes, and few entries are of a shape's sizes.
    _same_sizes: Mapping[object, Sequence[TileEntry]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found: dict[object, list[TileEntry]] = {}
        for entry in self.entries:
            found.setdefault(_sizes(entry.stage, entry.shape, entry.block_m), []).append(entry)
        object.__setattr__(self, "_same_sizes", found)

    def nearest(self, stage: str, shape: OpShape, block_m: int = 0) -> TileEntry | None:
        """The entry of the same op, sizes and block_m with the closest number of pairs, if close enough.

        Of several as close one whose other size agrees too: a projection's own, where two are as wide.
        """
        best: TileEntry | None = None
        best_distance, best_other = NEAREST, True
        for entry in self._same_sizes.get(_sizes(stage, shape, block_m), ()):
            distance = abs(math.log2(entry.shape.num_pairs / max(1, shape.num_pairs)))
            at = entry.shape
            other = (at.in_features, at.out_features) != (shape.in_features, shape.out_features)
            if (distance, other) <= (best_distance, best_other):
                best, best_distance, best_other = entry, distance, other
        return best


def _sizes(stage: str, shape: OpShape, block_m: int) -> tuple[str, int, str, int, int, int]:
    # a shrink never sees the output's width, nor an expand the input's
    in_features = 0 if stage == "expand" else shape.in_features
    out_features = 0 if stage == "shrink" else shape.out_features
    return stage, block_m, shape.op, in_features, out_features, shape.max_rank


def file_of(device: str) -> Path:
    """Where a device's table lies: "NVIDIA H200" in nvidia_h200.json."""
    return FOLDER / f"{device.lower().replace(' ', '_').replace('/', '_')}.json"


def parse(text: str) -> TileTable:
    """A table from its JSON text; raises KeyError, TypeError or ValueError on anything else."""
    raw = json.loads(text)
    entries = [
        TileEntry(e["stage"], OpShape(**e["shape"]), e["block_m"], e["tiles"], e["us"])
        for e in raw["entries"]
    ]
    if any(entry.shape.num_pairs < 1 for entry in entries):
        raise ValueError("an entry is of no pairs")
    return TileTable(raw["device"], raw["measured"], entries)


def read_table(path: Path, device: str, parse_text: Callable[[str], Table]) -> Table:
    """The table in `path`, measured on `device`: another's tiles may not even fit its shared memory.

    Raises:
        ValueError: the file is damaged or of another device; the message names it.
    """
    text = path.read_text()
    try:
        table, found = parse_text(text), json.loads(text)["device"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table of tiles: {type(error).__name__}: {error}") from error
    if found != device:
        raise ValueError(f"{path} holds what was measured on {found!r}, not on {device!r}")
    return table


@MEASURED.decide
@cache
def load(device: str) -> TileTable:
    """The shipped table of `device`, or an empty one."""
    path = file_of(device)
    return (
        read_table(path, device, parse) if MEASURED.are_used and path.exists() else TileTable(device, "", ())
    )
