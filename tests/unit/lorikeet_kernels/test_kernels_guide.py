"""The example of docs/kernels.md computes what it says, and its commands are all there are."""

import re
from pathlib import Path
from typing import Any

import torch

import lorikeet_kernels

GUIDE = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text()


def test_the_example() -> None:
    """Rows with the adapter have B A x on top; the base's row keeps its bits; a workspace changes nothing."""
    code, with_workspace = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    without = names["y"]
    exec(with_workspace, names)
    assert torch.equal(names["y"], without)
    wide = {name: names[name].double() for name in ("x", "weight", "a", "b")}
    delta = wide["x"] @ wide["a"].T @ wide["b"].T
    delta[1] = 0
    expected = wide["x"] @ wide["weight"].T + delta
    assert torch.allclose(names["y"].double(), expected, rtol=1e-4, atol=1e-4)
    assert delta[0].norm() > 1
    assert torch.equal(names["y"][1], names["base"][1])


def test_every_room_is_named() -> None:
    """With ops or without."""
    (package,) = lorikeet_kernels.__path__
    rooms = {path.parent.name for path in Path(package).glob("*/__init__.py")}
    assert not {room for room in rooms if f"`{room}`" not in GUIDE.split("\n## What there is\n")[1]}


def test_every_command_is_named() -> None:
    """A module with a `main` is a command, and the table has it."""
    (package,) = lorikeet_kernels.__path__
    commands = {path.stem for path in Path(package).glob("*.py") if '"__main__"' in path.read_text()}
    table = GUIDE.split("\n## Commands\n")[1]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == commands
