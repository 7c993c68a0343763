"""Virtual token counters: which tenant is next, after "Fairness in Serving Large Language Models" (VTC).

Every tenant's counter grows with the tokens computed for it, divided by its weight; the lowest is served
next. A tenant that comes back from idleness is lifted to the lowest counter among the busy: idleness earns
nothing.
"""

from collections.abc import Iterable

from inference_service.domain.tenant import TenantShare

# An output token takes a step of its own where prompt tokens share one; the paper's weights.
PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0


class TokenCounters:
    """Counters of all tenants that are busy, that is, have requests waiting or running."""

    def __init__(self) -> None:
        self._shares: dict[str, TenantShare] = {}
        self._busy: dict[str, float] = {}
        self._idle: dict[str, float] = {}
        self._last_idle = 0.0

    def set_shares(self, shares: Iterable[TenantShare]) -> None:
        """Replace all tenants' shares; counters stay."""
        self._shares = {share.tenant: share for share in shares}
        # Counters of tenants that left the catalog must not pile up.
        self._idle = {tenant: count for tenant, count in self._idle.items() if tenant in self._shares}

    def share(self, tenant: str) -> TenantShare:
        """The tenant's share; unknown tenants have weight 1 and no limits of their own."""
        return self._shares.get(tenant) or TenantShare(tenant)

    def arrive(self, tenant: str) -> None:
        """The tenant has a request now."""
        if tenant not in self._busy:
            floor = min(self._busy.values(), default=self._last_idle)
            self._busy[tenant] = max(self._idle.pop(tenant, 0.0), floor)

    def leave(self, tenant: str) -> None:
        """The tenant's last request ended."""
        self._last_idle = self._busy.pop(tenant)
        if tenant in self._shares:
            self._idle[tenant] = self._last_idle

    def charge(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """Count tokens computed for a busy tenant."""
        cost = PROMPT_TOKEN_COST * prompt_tokens + OUTPUT_TOKEN_COST * output_tokens
        share = self._shares.get(tenant)
        self._busy[tenant] += cost if share is None else cost / max(share.weight, 1e-6)

    def counter(self, tenant: str) -> float:
        """A busy tenant's counter."""
        return self._busy[tenant]
