"""Options that take a list with commas. What is wrong in one is a usage error, before a GPU is asked for."""

import argparse
from collections.abc import Callable, Iterable


def names_among(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An argparse type: names that are all known."""
    all_known = tuple(known)

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in all_known]:
            words = ", ".join(map(repr, unknown))
            raise argparse.ArgumentTypeError(f"unknown: {words}; known: {', '.join(all_known)}")
        return chosen

    return names


def counts(text: str) -> list[int]:
    """An argparse type: whole numbers above 0."""
    parts = text.split(",")
    if wrong := [part for part in parts if not part.isdecimal() or int(part) == 0]:
        raise argparse.ArgumentTypeError(f"no whole numbers above 0: {', '.join(map(repr, wrong))}")
    return [int(part) for part in parts]
