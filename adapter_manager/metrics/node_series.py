"""Each node as the manager knows it: connected, what it should have, what it has, how far it lags."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from adapter_manager.domain.adapter import RevisionState
from adapter_manager.domain.catalog import NodeCatalog, RegistryView
from adapter_manager.domain.node import ResidencyTier, ResidentAdapter
from adapter_manager.domain.placement import plan

_NEAR = (ResidencyTier.HOST, ResidencyTier.COPYING, ResidencyTier.ACTIVE)


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node at one moment. `catalog` is what it should have, None while its model is not known."""

    address: str
    is_connected: bool
    catalog_generation: int
    catalog: NodeCatalog | None
    held: tuple[ResidentAdapter, ...]


def node_families(view: RegistryView, nodes: Sequence[NodeView]) -> Iterator[Metric]:
    """All of them. What cannot be known of a node that is not connected is left out."""
    connected = GaugeMetricFamily(
        "lorikeet_node_connected", "1 while the manager follows the node.", labels=("node",)
    )
    behind = GaugeMetricFamily(
        "lorikeet_node_catalog_lag",
        "Generations by which the node's catalog is behind the registry.",
        labels=("node",),
    )
    steps = GaugeMetricFamily(
        "lorikeet_node_residency_lag",
        "Loads and unloads until the node has what it should.",
        labels=("node", "step"),
    )
    desired = GaugeMetricFamily(
        "lorikeet_node_desired_revisions",
        "Revisions that should be near the device, by tier.",
        labels=("node", "tier"),
    )
    observed = GaugeMetricFamily(
        "lorikeet_node_observed_revisions",
        "Revisions that are near the device, by tier.",
        labels=("node", "tier"),
    )
    registered = _registered(view)
    for node in nodes:
        connected.add_metric((node.address,), node.is_connected)
        if not node.is_connected or node.catalog is None:
            continue
        behind.add_metric((node.address,), max(0, view.generation - max(0, node.catalog_generation)))
        loads, unloads = plan(node.catalog, node.held, registered)
        steps.add_metric((node.address, "load"), len(loads))
        steps.add_metric((node.address, "unload"), len(unloads))
        wanted = Counter(wish.tier for wish in node.catalog.revisions)
        there = Counter(adapter.tier for adapter in node.held)
        for tier in _NEAR:
            observed.add_metric((node.address, tier.value), there[tier])
            if tier is not ResidencyTier.COPYING:
                desired.add_metric((node.address, tier.value), wanted[tier])
    yield from (connected, behind, steps, desired, observed)


def _registered(view: RegistryView) -> frozenset[str]:
    return frozenset(
        r.digest
        for adapter in view.adapters.values()
        for r in adapter.revisions
        if r.state is not RevisionState.DELETING
    )
