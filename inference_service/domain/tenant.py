"""A tenant's share of the engine, as the catalog sets it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantShare:
    """Weight in the fair order, and limits of its own; a limit of 0 leaves only the engine's."""

    tenant: str
    weight: float = 1.0
    max_running_requests: int = 0
    max_waiting_requests: int = 0
