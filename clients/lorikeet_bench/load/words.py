"""Counts in sentences. Pure."""


def counted(count: int, noun: str) -> str:
    """A number of things: 1 adapter, 2 adapters."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
