"""Sets of numbers, and of tuples of numbers, in short: "0-47", or ranges whose every combination is there."""

from collections.abc import Collection, Iterable, Iterator


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges in ascending order, e.g. "0-3,5"; "" for none."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def products(tuples: Collection[tuple[int, ...]]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Disjoint products of ranges that together are the given set, each with its size.

    The tuples have one length. A set that is a product, such as all experts of all layers, gives one.
    """
    for members in _products(frozenset(tuples)):
        size = 1
        for numbers in members:
            size *= len(numbers)
        yield tuple(ranges(numbers) for numbers in members), size


def _products(tuples: frozenset[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], ...]]:
    if () in tuples:
        yield ()
        return
    rests: dict[int, set[tuple[int, ...]]] = {}
    for first, *rest in tuples:
        rests.setdefault(first, set()).add(tuple(rest))
    firsts: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for first in sorted(rests):
        firsts.setdefault(frozenset(rests[first]), []).append(first)
    for rest, numbers in firsts.items():
        for product in _products(rest):
            yield (tuple(numbers), *product)
