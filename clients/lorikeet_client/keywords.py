"""What the type checker knows of options and the running program must know, too."""

from collections.abc import Iterable, Mapping

from lorikeet_client.message_fields import check_kind


def refuse_unknown(given: Mapping[str, object], known: type) -> None:
    """Raise TypeError for a keyword that the TypedDict `known` does not have.

    Python itself lets `**options` take anything: a misspelt `adapter` would be answered by the base model.
    """
    if unknown := sorted(given.keys() - known.__annotations__.keys()):
        names = ", ".join(sorted(known.__annotations__))
        raise TypeError(f"unknown option {unknown[0]!r}; there are: {names}")


def texts(values: Iterable[str], name: str) -> tuple[str, ...]:
    """`values` as a tuple; raise TypeError for one text, which Python would take letter by letter."""
    if isinstance(values, str):
        raise TypeError(f"{name} is a list of texts: write [{values!r}]")
    check_kind(values, Iterable, name, "a list of texts")
    return tuple(values)
