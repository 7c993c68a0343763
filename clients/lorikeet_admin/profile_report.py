"""A profile for people's eyes."""

from rich.console import Console

from lorikeet_admin.tables import plain_table
from lorikeet_bench.engine.decode_profile import DecodeProfile, part_of
from lorikeet_bench.load.step_floor import DecodeStepBytes
from lorikeet_bench.load.words import counted

_SHOWN_CHARACTERS = 90


def show_profile(console: Console, profile: DecodeProfile, floor: DecodeStepBytes) -> None:
    """Every kernel, the parts beside their floors, the gaps; of a CPU, which has no floor, the operators."""
    load = (
        f"{counted(profile.rows, 'request')} over {counted(profile.adapters, 'adapter')} on {profile.device}"
    )
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
        ops.add_row(
            _shown(op.name), part_of(op.name), f"{op.calls:.1f}", f"{op.us:.1f}", f"{op.us / op.calls:.2f}"
        )
    console.print(ops)
    floors = floor.by_part()
    parts = plain_table("part", "us a step", "floor us", "share of floor")
    for part, us in profile.by_part().items():
        least_us = 1e6 * floors.pop(part, 0.0)
        share = f"{100 * least_us / us:.0f} %" if least_us and us else ""
        parts.add_row(part, f"{us:.1f}", f"{least_us:.1f}" if least_us else "", share)
    for part, seconds in floors.items():
        if seconds:
            parts.add_row(part, "not seen", f"{1e6 * seconds:.1f}", "")
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


def _show_operators(console: Console, profile: DecodeProfile, load: str) -> None:
    console.print(f"{load}: a step takes {profile.step_us:.0f} us")
    console.print(
        f"under the profiler, over {profile.steps} steps: operators take {profile.busy_us:.0f} us a step"
    )
    ops = plain_table("op", "calls a step", "us a step", "us a call")
    for op in profile.ops:
        ops.add_row(_shown(op.name), f"{op.calls:.1f}", f"{op.us:.1f}", f"{op.us / op.calls:.2f}")
    console.print(ops)


def _shown(name: str) -> str:
    return name if len(name) <= _SHOWN_CHARACTERS else name[: _SHOWN_CHARACTERS - 3] + "..."
