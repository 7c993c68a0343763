"""Residency's own settings; `EngineConfig` says what they mean."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResidencyConfig:
    """Fixed for the engine's life."""

    max_loads_in_flight: int = 2
    max_wait_s: float = 120.0
    slot_patience_s: float = 0.5
    load_retry_s: float = 5.0
