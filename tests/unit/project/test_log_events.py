"""Log events have a form, and those of docs/logs.md are what the code emits, at those levels."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.unit.project.repository import read, written_python

ROOMS = ("inference_service", "adapter_manager", "protos")
LEVELS = {"debug", "info", "warning", "error", "exception"}
FORM = re.compile(r"[a-z]+\.[a-z]+(_[a-z]+)*")
# What operators were promised to find. A refused call has no line but its last, which has the reason.
PROMISED = {
    "server": "started draining stopped",
    "request": "accepted first_token finished aborted",
    "engine": "step_failed stalled",
    "adapter": "upload_started rejected registered deleted",
    "residency": "pushed push_failed admitted activated evicted_from_slot evicted_from_host pinned unpinned "
    "reconciled",
    "redis": "unavailable recovered",
}


def emitted() -> Iterator[tuple[str, str, Path]]:
    """Event, level and file of each log call."""
    for path in written_python():
        if path.parts[0] not in ROOMS:
            continue
        tree = ast.parse(read(path) or "")
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        aliases = _aliases(tree)
        for call in calls:
            level = _level(call, aliases)
            for event in _constants(call.args[0]) if level and call.args else ():
                yield event, level, path


def _aliases(tree: ast.AST) -> dict[str, set[str]]:
    """Names that stand for one of several methods: `emit = log.info if ... else log.warning`."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            methods = {
                part.attr
                for part in ast.walk(node.value)
                if isinstance(part, ast.Attribute)
                and isinstance(part.value, ast.Name)
                and part.value.id == "log"
            }
            if methods and methods <= LEVELS:
                found[node.targets[0].id] = methods
    return found


def _level(call: ast.Call, aliases: dict[str, set[str]]) -> str:
    match call.func:
        case ast.Attribute(value=ast.Name(id="log"), attr=method) if method in LEVELS:
            return "error" if method == "exception" else method
        case ast.Name(id=name) if name in aliases:
            return ", ".join(sorted(aliases[name]))
        case _:
            return ""


def _constants(event: ast.expr) -> list[str]:
    match event:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.IfExp(body=first, orelse=second):
            return [*_constants(first), *_constants(second)]
        case _:
            raise AssertionError(f"an event is no constant: {ast.unparse(event)}")


def documented() -> dict[str, str]:
    """Levels of the events in the document."""
    rows = re.findall(r"^\| `([\w.]+)` \| ([\w, ]+) \|", read(Path("docs/logs.md")) or "", re.MULTILINE)
    assert len(rows) == len(dict(rows))
    return dict(rows)


def test_events_have_a_form() -> None:
    """A noun, a dot, a past verb; nothing of the moment in it."""
    events = {event: path for event, _, path in emitted()}
    assert len(events) > 40
    assert not {event: str(path) for event, path in events.items() if not FORM.fullmatch(event)}


def test_documented_events_are_emitted_at_their_levels() -> None:
    """A document that promises more than the code keeps is worse than none."""
    found: dict[str, set[str]] = {}
    for event, level, _ in emitted():
        found.setdefault(event, set()).add(level)
    assert {event: {level} for event, level in documented().items()} == {
        event: found.get(event, set()) for event in documented()
    }


def test_promised_events_are_documented() -> None:
    """All of them."""
    promised = {f"{noun}.{verb}" for noun, verbs in PROMISED.items() for verb in verbs.split()}
    assert promised <= documented().keys()
