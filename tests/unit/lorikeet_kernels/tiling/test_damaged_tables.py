"""Tables of tiles that are damaged, or another device's: refused with their path."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorikeet_kernels.tiling import expert_tiles, few_rows_tiles, tile_table

DEVICE = "NVIDIA H200"
LOADERS = {
    "": (tile_table, tile_table.load),
    "_experts": (expert_tiles, expert_tiles.load_expert_table),
    "_few_rows": (few_rows_tiles, few_rows_tiles.load_few_rows_table),
}

Shipped = tuple[Path, Callable[[], object]]


@pytest.fixture(params=list(LOADERS))
def shipped(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shipped:
    """A copy of a shipped table, and what reads it anew."""
    module, load = LOADERS[request.param]
    path = tmp_path / f"nvidia_h200{request.param}.json"
    path.write_text((tile_table.FOLDER / path.name).read_text())
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    return path, lambda: load.__wrapped__(DEVICE)


def change(path: Path, **fields: Any) -> None:
    """Rewrite fields of the file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_table_is_of_one_device(shipped: Shipped) -> None:
    """A copy under another device's name is not used."""
    path, load = shipped
    assert load()
    change(path, device="NVIDIA A100")
    with pytest.raises(ValueError, match=rf"{path.name} holds .* on 'NVIDIA A100', not on 'NVIDIA H200'"):
        load()


@pytest.mark.parametrize("entries", [None, [{}], [{"shape": {"rows": 1}}]])
def test_a_damaged_table_is_named(shipped: Shipped, entries: Any) -> None:
    """Of another form, or cut off."""
    path, load = shipped
    change(path, entries=entries)
    with pytest.raises(ValueError, match=rf"{path.name} is no table of tiles"):
        load()
    path.write_text(path.read_text()[:20])
    with pytest.raises(ValueError, match=rf"{path.name} is no table of tiles"):
        load()


def test_an_entry_of_no_pairs_is_refused_as_it_is_read(tmp_path: Path) -> None:
    """And not when its distance to a step is asked for."""
    path = tmp_path / "table.json"
    path.write_text((tile_table.FOLDER / "nvidia_h200.json").read_text())
    entry = json.loads(path.read_text())["entries"][0]
    change(path, entries=[entry | {"shape": entry["shape"] | {"num_pairs": 0}}])
    with pytest.raises(ValueError, match=r"table.json is no table of tiles: .* no pairs"):
        tile_table.read_table(path, DEVICE, tile_table.parse)
