"""What a figure was measured on: every result carries it."""

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts of a run's time and place.

    `platform` is system and processor, not one kernel's build. `load` is the machine's one-minute load
    average at that moment.
    """

    date: str
    commit: str
    python: str
    packages: dict[str, str]
    platform: str
    cores: int
    memory_bytes: int
    load: float


def describe_machine(*packages: str) -> Machine:
    """This machine now, with the versions of these packages."""
    return Machine(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=_commit(),
        python=platform.python_version(),
        packages={name: _version(name) for name in ("lorikeet", *packages)},
        platform=f"{platform.system()} {platform.machine()}",
        cores=os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        load=round(os.getloadavg()[0], 2),
    )


def _version(package: str) -> str:
    """Of a package; a source tree may run without being installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The source tree's commit; empty outside one."""
    return command_output(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"], Path(__file__).parent
    )


def command_output(command: Sequence[str], cwd: Path | None = None) -> str:
    """What a tool of the machine prints; empty where it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)  # noqa: S603 (literal words only)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
