"""Which engine a bench wants. Imports nothing of the service: every command line is read by it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorikeet_bench.load.generated_adapters import AdapterShape
from lorikeet_bench.rigs import RigShape


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What to start.

    `slots` is the number of adapters that are made and loaded; 0 is a server without any. `most_open`
    requests of `longest` tokens fit the cache at once. `rig` says that the model is an exact rig's base.
    `overrides` are fields of EngineConfig. `directory` is for adapters and caches; about one adapter's bytes
    are written.
    """

    model_dir: Path
    directory: Path
    load_format: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    slots: int = 0
    adapters: AdapterShape = field(default_factory=AdapterShape)
    most_open: int | None = None
    longest: int = 2200
    rig: RigShape | None = None
    overrides: dict[str, Any] = field(default_factory=dict[str, Any])
