"""Reads compose files as Compose does, as far as ours use it: YAML, merging of files, interpolation."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_VARIABLE = re.compile(
    r"\$(?:(?P<escaped>\$)|(?P<plain>[A-Za-z_]\w*)|"
    r"\{(?P<name>[A-Za-z_]\w*)(?:(?P<kind>:?[-?])(?P<rest>[^{}]*))?\})"
)
# Of these a later file's value takes the place of an earlier one's; other sequences are joined.
_REPLACED = {"command", "entrypoint", "test"}


class MissingVariableError(Exception):
    """A variable that the file demands is not set; the message is the file's own."""


class Override:
    """A value tagged `!override`: it replaces instead of being merged."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """A safe loader, in C where there is one, with `!override`."""


def _construct_override(loader: _Loader, node: yaml.Node) -> Override:
    if isinstance(node, yaml.MappingNode):
        return Override(loader.construct_mapping(node, deep=True))
    assert isinstance(node, yaml.SequenceNode)
    return Override(loader.construct_sequence(node, deep=True))


_Loader.add_constructor("!override", _construct_override)


def parse_compose(texts: Sequence[str]) -> dict[str, Any]:
    """The merged files, with variables as they stand, `extends` resolved."""
    merged: dict[str, Any] = {}
    for text in texts:
        document: Any = yaml.load(text, _Loader)  # a safe one
        for name, service in document.get("services", {}).items():
            if (parent := service.pop("extends", None)) is not None:
                document["services"][name] = _merged(merged["services"][parent["service"]], service)
        merged = _merged(merged, document)
    return merged


def variables_of(texts: Sequence[str]) -> dict[str, bool]:
    """Every variable that the files use, and whether some use demands it."""
    found: dict[str, bool] = {}
    for text in texts:
        for match in _VARIABLE.finditer(_without_comments(text)):
            if name := match["plain"] or match["name"]:
                found[name] = found.get(name, False) or "?" in (match["kind"] or "")
    return found


def interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    """`value` with every variable in its strings replaced.

    Raises:
        MissingVariableError: `${NAME:?message}` without a value.
    """
    match value:
        case str():
            return _VARIABLE.sub(lambda match: _replacement(match, variables), value)
        case list():
            return [interpolated(item, variables) for item in value]
        case dict():
            return {key: interpolated(item, variables) for key, item in value.items()}
        case _:
            return value


def load_compose(paths: Sequence[Path], variables: Mapping[str, str]) -> dict[str, Any]:
    """What `docker compose -f PATH ... config` would say, as far as needed here."""
    return interpolated(parse_compose([path.read_text() for path in paths]), variables)


def seconds(duration: str) -> float:
    """A duration such as 1m30s."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    parts = re.findall(r"(\d+)(ms|s|m|h)", duration)
    assert parts, duration
    assert "".join(number + unit for number, unit in parts) == duration, duration
    return sum(int(number) * units[unit] for number, unit in parts)


def _replacement(match: re.Match[str], variables: Mapping[str, str]) -> str:
    if match["escaped"]:
        return "$"
    name, kind, rest = match["plain"] or match["name"], match["kind"] or "", match["rest"] or ""
    value = variables.get(name)
    is_set = bool(value) if kind.startswith(":") else value is not None
    if is_set:
        return value or ""
    if kind.endswith("?"):
        raise MissingVariableError(f"{name}: {rest}")
    return rest


def _without_comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def _merged(old: Any, new: Any, key: str = "") -> Any:
    if isinstance(new, Override):
        return new.value
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{name: _merged(old.get(name), item, name) for name, item in new.items()}}
    if isinstance(old, list) and isinstance(new, list) and key not in _REPLACED:
        if key == "volumes":
            targets = {volume_target(item) for item in new}
            return [item for item in old if volume_target(item) not in targets] + new
        return old + [item for item in new if item not in old]
    return new


def volume_target(volume: str | Mapping[str, Any]) -> str:
    """Where a volume, in either spelling, is mounted."""
    return Volume.parse(volume).target


@dataclass(frozen=True, slots=True)
class Volume:
    """One mount of a service."""

    kind: str
    source: str
    target: str
    read_only: bool

    @classmethod
    def parse(cls, volume: str | Mapping[str, Any]) -> "Volume":
        """Either spelling: `source:target[:ro]`, or the mapping."""
        if not isinstance(volume, str):
            return cls(
                volume["type"], volume["source"], volume["target"], bool(volume.get("read_only", False))
            )
        # A variable's own default or message may hold colons.
        text, names = volume, []
        for match in re.finditer(r"\$\{[^{}]*\}", volume):
            names.append(match[0])
            text = text.replace(match[0], f"\0{len(names) - 1}\0", 1)
        parts = [re.sub("\0(\\d+)\0", lambda m: names[int(m[1])], part) for part in text.split(":")]
        source, target, options = (*parts, "")[:3]
        kind = "bind" if source.startswith((".", "/", "$")) else "volume"
        return cls(kind, source, target, "ro" in options.split(","))
