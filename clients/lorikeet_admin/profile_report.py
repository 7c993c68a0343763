"""A profile for people's eyes."""

from rich.console import Console
from rich.table import Table

from lorikeet_admin.tables import plain_table
from lorikeet_bench.engine.decode_profile import DecodeProfile, ProfiledPoint
from lorikeet_bench.load.words import counted

_SHOWN_CHARACTERS = 90
# On a CPU a step has about a hundred, most of them too short to matter; --json has all.
_SHOWN_OPERATORS = 20


def show_profile(console: Console, point: ProfiledPoint) -> None:
    """Every kernel, the parts beside their floors, the gaps; of a CPU, which has no floor, the operators."""
    profile, floor = point.profile, point.floor
    # Fewer requests than adapters name only some.
    named = f"{profile.adapters} of " if profile.adapters < point.adapters else ""
    adapters = f"{named}{counted(max(profile.adapters, point.adapters), 'adapter')}"
    load = f"{counted(profile.rows, 'request')} over {adapters} on {profile.device}"
    if profile.device == "cpu":
        _show_operators(console, profile, load)
        return
    console.print(
        f"{load}: a step takes {profile.step_us:.0f} us, its floor is {1e6 * floor.seconds:.0f} us "
        f"({floor.total / 1e9:.2f} GB)"
    )
    console.print(
        f"under the profiler, over {profile.steps} steps: busy {profile.busy_us:.0f} us a step, "
        f"idle {profile.gap_us:.0f} us"
    )
    ops = plain_table("kernel", "part", "calls a step", "us a step", "us a call")
    for op in profile.ops:
        ops.add_row(_shown(op.name), op.part, f"{op.calls:.1f}", f"{op.us:.1f}", f"{op.us / op.calls:.2f}")
    console.print(ops)
    parts = plain_table("part", "us a step", "floor us", "share of floor")
    for part in point.parts:
        _add_part(parts, part.part, part.us, part.floor_us)
    _add_part(parts, "all kernels", sum(op.us for op in profile.ops), 1e6 * floor.seconds)
    console.print(parts)
    if profile.gaps:
        gaps = plain_table("gap after", "before", "a step", "us a step")
        for gap in profile.gaps:
            gaps.add_row(
                gap.after[:_SHOWN_CHARACTERS],
                gap.before[:_SHOWN_CHARACTERS],
                f"{gap.count:.1f}",
                f"{gap.us:.1f}",
            )
        console.print(gaps)


def _add_part(table: Table, name: str, us: float, floor_us: float | None) -> None:
    share = f"{100 * floor_us / us:.0f} %" if floor_us and us else ""
    table.add_row(
        name, f"{us:.1f}" if us else "not seen", "" if floor_us is None else f"{floor_us:.1f}", share
    )


def _show_operators(console: Console, profile: DecodeProfile, load: str) -> None:
    console.print(f"{load}: a step takes {profile.step_us:.0f} us")
    console.print(
        f"under the profiler, over {profile.steps} steps: operators take {profile.busy_us:.0f} us a step"
    )
    ops = plain_table("op", "calls a step", "us a step", "us a call")
    for op in profile.ops[:_SHOWN_OPERATORS]:
        ops.add_row(_shown(op.name), f"{op.calls:.1f}", f"{op.us:.1f}", f"{op.us / op.calls:.2f}")
    if others := profile.ops[_SHOWN_OPERATORS:]:
        calls, us = sum(op.calls for op in others), sum(op.us for op in others)
        ops.add_row(f"{counted(len(others), 'other')}", f"{calls:.1f}", f"{us:.1f}", f"{us / calls:.2f}")
    console.print(ops)


def _shown(name: str) -> str:
    return name if len(name) <= _SHOWN_CHARACTERS else name[: _SHOWN_CHARACTERS - 3] + "..."
