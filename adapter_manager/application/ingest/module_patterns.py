r"""rank_pattern and alpha_pattern with PEFT's meaning, and a bound on the time that they may take.

PEFT takes the first key, in file order, with re.match(rf"(.*\.)?({key})$", name). Nearly all keys are names,
or names behind "^", ".*" or ".*\.": those are looked up in tables, exactly and at once, for adapters that
list thousands of modules. The rest runs in the `regex` library, which can be told to stop.
"""

import math
import re
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Generic, TypeVar

import regex

from adapter_manager.domain.errors import InvalidAdapterError
from adapter_manager.domain.peft_config import PeftConfig
from adapter_manager.domain.shown_text import shown

ValueT = TypeVar("ValueT", int, float)

_MAX_EXPRESSIONS = 256
# One match of a sound expression takes microseconds.
_MAX_MATCH_S = 0.25
_SIMPLE = re.compile(r"(?P<head>\^|\.\*\\\.|\.\*)?(?P<tail>(?:[A-Za-z0-9_\-.]|\\\.)+)")
# Where `regex` reads an expression otherwise than `re`: extensions, classes of classes, fuzzy counts.
_FOREIGN = re.compile(
    r"\(\?(?!:|=|!|<=|<!|P<|P=)|\[\[|\[:|--|&&|\|\||~~|\{(?!\d+(?:,\d*)?\}|,\d+\})|\\[^\W\ddDwWsSbBAZ]"
)
# The larger number of {2}, {2,} and {2,5}. To compile "x{99999999}" takes minutes, which nothing interrupts.
_COUNT = re.compile(r"(\d+),?\}")
_MAX_REPEATS = 1000
# A dot that stands for any character; it cannot occur in a tensor's name.
_ANY = "?"


class _Table(Generic[ValueT]):
    """Keys that are names, in groups by (anchor, length, wildcards): the name, wildcards masked -> key."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int, tuple[int, ...]], dict[str, int]] = {}

    def add(self, order: int, head: str, tail: str) -> None:
        literal = tail.replace("\\.", "\0").replace(".", _ANY).replace("\0", ".")
        if head == ".*\\.":
            head, literal = ".*", f".{literal}"
        holes = tuple(i for i, c in enumerate(literal) if c == _ANY)
        self._groups.setdefault((head, len(literal), holes), {}).setdefault(literal, order)

    def first(self, name: str) -> int | None:
        """The first key that matches `name`."""
        best: int | None = None
        for (head, length, holes), literals in self._groups.items():
            start = len(name) - length
            if start < 0 or (head == "^" and start) or (not head and start and name[start - 1] != "."):
                continue
            end = name[start:]
            if holes:
                masked = list(end)
                for hole in holes:
                    masked[hole] = _ANY
                end = "".join(masked)
            order = literals.get(end)
            if order is not None and (best is None or order < best):
                best = order
        return best


class _TimeBudget:
    """Seconds of this thread left for all matching of one configuration; others' load costs nothing."""

    def __init__(self, max_s: float) -> None:
        self.left_s = max_s

    def charge(self, since_s: float) -> None:
        """Take the time since `since_s` off; TimeoutError once there is none left."""
        self.left_s -= time.thread_time() - since_s
        if self.left_s <= 0:
            raise TimeoutError


class _PatternTable(Generic[ValueT]):
    """One pattern field: names in, the first matching key's value out."""

    def __init__(self, field: str, pairs: Iterable[tuple[str, ValueT]], budget: _TimeBudget) -> None:
        self._field = field
        self._values: list[ValueT] = []
        self._table: _Table[ValueT] = _Table()
        self._expressions: list[tuple[int, regex.Pattern[str]]] = []
        self._budget = budget
        expressions = list[tuple[int, str]]()
        for order, (key, value) in enumerate(pairs):
            self._values.append(value)
            if match := _SIMPLE.fullmatch(key):
                self._table.add(order, match["head"] or "", match["tail"])
            else:
                expressions.append((order, key))
        # Counted before the first is compiled: that alone takes milliseconds for a long one.
        if len(expressions) > _MAX_EXPRESSIONS:
            raise self._error(
                f"has {len(expressions)} regular expressions; at most {_MAX_EXPRESSIONS} are tried"
            )
        for order, key in expressions:
            with self._charged():
                self._expressions.append((order, self._compile(key)))

    def find(self, name: str) -> ValueT | None:
        """The value for a module or parameter; None where no key matches."""
        if not self._values:
            return None
        with self._charged():
            best = self._table.first(name)
            for order, expression in self._expressions:
                if best is not None and order > best:
                    break
                if expression.match(name, timeout=_MAX_MATCH_S):
                    best = order
                    break
        return None if best is None else self._values[best]

    @contextmanager
    def _charged(self) -> Generator[None]:
        """Take the time spent inside off the budget."""
        since_s = time.thread_time()
        try:
            yield
            self._budget.charge(since_s)
        except TimeoutError:
            raise self._error(
                "takes too long to match with the modules' names: write names instead of regular expressions"
            ) from None

    def _compile(self, key: str) -> "regex.Pattern[str]":
        if _FOREIGN.search(key):
            raise self._error(f"key {shown(key)} uses an uncommon regular expression: write a name instead")
        repeats = math.prod(max(1, int(count)) for count in _COUNT.findall(key))
        if repeats > _MAX_REPEATS:
            raise self._error(
                f"key {shown(key)} repeats {shown(repeats)} times; at most {_MAX_REPEATS} are tried"
            )
        try:
            return regex.compile(rf"(.*\.)?({key})$", flags=regex.VERSION0)
        except (regex.error, RecursionError, OverflowError, ValueError):
            raise self._error(f"key {shown(key)} is not a regular expression") from None

    def _error(self, problem: str) -> InvalidAdapterError:
        return InvalidAdapterError(
            f"adapter_config.json: {self._field} {problem}",
            metadata={"problem": "CONFIG", "file": "adapter_config.json", "field": self._field},
        )


class ModulePatterns:
    """Rank and alpha of every module, as the configuration gives them."""

    def __init__(self, config: PeftConfig, max_s: float) -> None:
        """Compile the patterns.

        Raises:
            InvalidAdapterError: a key is no regular expression. Looking names up raises it, too, once more
                than `max_s` seconds went into it.
        """
        self._config = config
        budget = _TimeBudget(max_s)
        self._ranks = _PatternTable("rank_pattern", config.rank_pattern, budget)
        self._alphas = _PatternTable("alpha_pattern", config.alpha_pattern, budget)

    def rank_and_alpha(self, name: str) -> tuple[int, float]:
        """What the module or parameter called `name` has."""
        rank, alpha = self._ranks.find(name), self._alphas.find(name)
        return (
            self._config.rank if rank is None else rank,
            self._config.alpha if alpha is None else alpha,
        )
