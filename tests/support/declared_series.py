"""What a registry may ever export, whether it has samples or not."""

from typing import Any

from prometheus_client import CollectorRegistry


def declared(registry: CollectorRegistry) -> dict[str, frozenset[str]]:
    """Label names by family."""
    found: dict[str, frozenset[str]] = {}
    collectors: list[Any] = list(registry._collector_to_names)
    for collector in collectors:
        # The library's own counters know theirs; a collector of ours describes its families.
        for family in [collector] if hasattr(collector, "_labelnames") else collector.describe():
            name = family._name if hasattr(family, "_name") else family.name
            found[name] = frozenset(family._labelnames)
    return found
