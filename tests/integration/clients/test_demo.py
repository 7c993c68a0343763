"""`make demo`'s script: all four voices are heard at once, without a terminal, in its time."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.storyteller.rules import RULES

ROOT = Path(__file__).resolve().parents[3]


def panels(output: str) -> dict[str, str]:
    """Title to text of each box that the demo drew, its lines joined by blanks."""
    texts: dict[str, str] = {}
    open_boxes: dict[int, str] = {}
    for line in output.splitlines():
        column = -1
        while (column := line.find("╭─ ", column + 1)) >= 0:
            title = line[column + 3 :].split(" ", 1)[0]
            open_boxes[column], texts[title] = title, ""
        for column, title in list(open_boxes.items()):
            if line[column : column + 1] == "╰":
                del open_boxes[column]
            elif line[column : column + 1] == "│":
                texts[title] += line[column + 2 :].partition(" │")[0].rstrip() + " "
    return texts


@pytest.mark.long
def test_the_demo(tmp_path: Path) -> None:
    """Each text keeps its adapter's rule, base keeps none, and the residency table names all three."""
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - start_s < 180
    texts = panels(done.stdout)
    assert set(texts) == {"base", "demo/pirate", "demo/json", "demo/shouting"}
    for name, keeps_rule in RULES.items():
        assert keeps_rule(texts[f"demo/{name}"]), texts[f"demo/{name}"]
        assert not keeps_rule(texts["base"])
    json.loads(texts["demo/json"])
    residency = done.stdout.partition("$ lorikeet residency")[2]
    assert all(f"demo/{name}" in residency for name in RULES)
    assert "Stopped cleanly" in done.stdout
