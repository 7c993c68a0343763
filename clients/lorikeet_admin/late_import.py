"""Modules that come with torch: importing them takes seconds, which no other command should."""

from importlib import import_module
from typing import Any


def late_import(place: str) -> Any:
    """What "module:name" names, its module imported now."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
