"""What is registered: how much, in which state, and whose, for the largest tenants."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from adapter_manager.domain.adapter import RevisionState
from adapter_manager.domain.catalog import RegistryView

# Tenants with series of their own: those with the most adapters.
MAX_TENANTS = 20


@dataclass(frozen=True, slots=True)
class RegistryCounts:
    """One view, counted. The tenants are the largest, the largest first."""

    num_adapters: int
    revisions: Counter[RevisionState]
    adapters_of: tuple[tuple[str, int], ...]
    revisions_of: dict[str, Counter[RevisionState]]

    @staticmethod
    def of(view: RegistryView) -> "RegistryCounts":
        """Count a view; one pass."""
        adapters: Counter[str] = Counter(dict.fromkeys(view.tenants, 0))
        revisions: dict[str, Counter[RevisionState]] = {tenant: Counter() for tenant in view.tenants}
        for adapter in view.adapters.values():
            adapters[adapter.tenant] += 1
            revisions.setdefault(adapter.tenant, Counter()).update(r.state for r in adapter.revisions)
        largest = sorted(adapters.items(), key=lambda item: (-item[1], item[0]))[:MAX_TENANTS]
        total: Counter[RevisionState] = Counter()
        for states in revisions.values():
            total.update(states)
        return RegistryCounts(
            len(view.adapters), total, tuple(largest), {t: revisions[t] for t, _ in largest}
        )


def registry_families(view: RegistryView, counts: RegistryCounts) -> Iterator[Metric]:
    """All of them."""
    yield GaugeMetricFamily(
        "lorikeet_catalog_generation",
        "Generation of the registry as far as this manager has read it.",
        value=view.generation,
    )
    yield GaugeMetricFamily("lorikeet_registry_tenants", "Tenants.", value=len(view.tenants))
    yield GaugeMetricFamily(
        "lorikeet_registry_adapters", "Adapters of all tenants.", value=counts.num_adapters
    )
    states = GaugeMetricFamily(
        "lorikeet_registry_revisions", "Revisions of all tenants, by state.", labels=("state",)
    )
    for state in RevisionState:
        states.add_metric((state.value,), counts.revisions[state])
    yield states
    adapters = GaugeMetricFamily(
        "lorikeet_tenant_adapters", "Adapters of the tenants that have the most.", labels=("tenant",)
    )
    of_tenants = GaugeMetricFamily(
        "lorikeet_tenant_revisions", "Revisions of the same tenants, by state.", labels=("tenant", "state")
    )
    for tenant, number in counts.adapters_of:
        adapters.add_metric((tenant,), number)
        for state in RevisionState:
            of_tenants.add_metric((tenant, state.value), counts.revisions_of[tenant][state])
    yield adapters
    yield of_tenants
