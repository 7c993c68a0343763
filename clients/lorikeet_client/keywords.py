"""Keyword options given as TypedDicts: the type checker knows them, and so must the running program."""

from collections.abc import Mapping


def refuse_unknown(given: Mapping[str, object], known: type) -> None:
    """Raise TypeError for a keyword that the TypedDict `known` does not have.

    Python itself lets `**options` take anything: a misspelt `adapter` would be answered by the base model.
    """
    if unknown := sorted(given.keys() - known.__annotations__.keys()):
        names = ", ".join(sorted(known.__annotations__))
        raise TypeError(f"unknown option {unknown[0]!r}; there are: {names}")
