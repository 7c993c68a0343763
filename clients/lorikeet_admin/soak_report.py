"""A soak for people's eyes: a line while it runs, tables at its end."""

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lorikeet_admin.output import size
from lorikeet_admin.tables import plain_table
from lorikeet_bench.load.words import counted
from lorikeet_bench.soak import Fault, SoakProgress, SoakResult

# Where nobody watches, the line comes this often.
_PIPED_EVERY_S = 15.0


class SoakProgressLine:
    """One line that is rewritten in place on a terminal, and printed now and then elsewhere."""

    def __init__(self, console: Console, duration_s: float) -> None:
        self._console = console
        self._duration_s = duration_s
        self._live = (
            Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        )
        self._printed_s = -_PIPED_EVERY_S
        self._stage = ""

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def update(self, now: SoakProgress) -> None:
        """Show how far it is."""
        text = _progress_text(now, self._duration_s)
        if self._live:
            self._live.update(Text(text), refresh=True)
            return
        if now.stage != self._stage or now.elapsed_s - self._printed_s >= _PIPED_EVERY_S:
            self._stage, self._printed_s = now.stage, now.elapsed_s
            self._console.print(text)

    def print(self, text: str) -> None:
        """Something that stays, above the line."""
        self._console.print(text)


def _progress_text(now: SoakProgress, duration_s: float) -> str:
    memory = "  ".join(f"{name} {used / 2**20:.1f}" for name, used in now.memory.items())
    elapsed_s = min(now.elapsed_s, duration_s)
    return (
        f"{now.stage} {elapsed_s:.0f}/{duration_s:.0f} s  {now.open_streams} open, {now.ended} ended, "
        f"{now.tokens} tokens  {now.operations} operations, {counted(now.standing_adapters, 'adapter')}  "
        f"wrong {now.wrong} lost {now.lost}  MiB: {memory}"
    )


def fault_text(fault: Fault) -> str:
    """A broken promise with all its facts."""
    word = "WRONG" if fault.kind.is_wrong else "LOST"
    facts = "\n".join(f"  {name}: {json.dumps(value, default=str)}" for name, value in fault.facts.items())
    return f"{word} at {fault.at_s:.3f}: {fault.kind}: {fault.message}\n{facts}"


def show_soak(console: Console, result: SoakResult, *, interrupted: bool) -> None:
    """The tables, and PASS, FAIL or INTERRUPTED with the reasons."""
    console.print(
        f"{result.duration_s:.0f} s, seed {result.seed}: {result.streams_open_at_most} streams at once over "
        f"{counted(result.adapters, 'adapter')}, {result.tokens} tokens"
    )
    console.print(_counts("streams ended by", result.streams))
    churn = plain_table("operation", "outcomes")
    for kind, outcomes in result.churn.items():
        churn.add_row(kind, ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    console.print(churn)
    if result.memory:
        memory = plain_table("process", "first fifth", "last fifth", "change", "highest", "flat within 2 %")
        for trend in result.memory:
            word = {True: "yes", False: "NO", None: "too short to say"}[trend.is_flat]
            first, last, highest = size(trend.first_bytes), size(trend.last_bytes), size(trend.highest_bytes)
            memory.add_row(trend.process, first, last, f"{100 * trend.change:+.2f} %", highest, word)
        console.print(memory)
    levels = plain_table("counter", "before", "after")
    for name, before in result.levels_before.items():
        levels.add_row(name, str(before), str(result.levels_after.get(name, "not looked at")))
    console.print(levels)
    if result.growth:
        console.print(_counts("grew by", result.growth))
    console.print(f"wrong {result.wrong}, lost {result.lost}")
    end = "INTERRUPTED" if interrupted else "FAIL"
    for failure in result.failures:
        console.print(f"{end}: {failure}")
    console.print("PASS" if result.has_passed else end)


def _counts(title: str, counts: Mapping[str, int]) -> object:
    table = plain_table(title, "count")
    for name, count in counts.items():
        table.add_row(name, str(count))
    return table
