"""The counters and sizes that must be back where they were when everything has been given back."""

from collections.abc import Mapping
from pathlib import Path

from lorikeet_bench.disk_usage import disk_usage
from lorikeet_client import EngineStatus

# Those of the engine's counters that only grow; how far says how hard the soak was.
GROWING = ("steps", "preemptions", "adapter_loads", "adapter_evictions", "prefix_hit_tokens", "compilations")


def levels(status: EngineStatus, disk: Mapping[str, Path]) -> dict[str, int]:
    """What must return, by name."""
    return {
        "running requests": status.running_requests,
        "waiting requests": status.waiting_requests,
        "KV blocks in use": status.kv_blocks_total - status.kv_blocks_available,
        "adapter leases": status.adapter_leases,
        "adapters in slots": status.active_adapters,
        "adapters in host memory": status.host_adapters,
        "arena bytes": status.arena_used_bytes,
        "host pool bytes": status.host_used_bytes,
        **{f"disk bytes: {name}": disk_usage(path) for name, path in disk.items()},
    }


def growth(before: EngineStatus, after: EngineStatus) -> dict[str, int]:
    """How far the growing counters went."""
    return {name.replace("_", " "): getattr(after, name) - getattr(before, name) for name in GROWING}
