"""Who calls, as the verified token says it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant, or an admin who may act for every tenant and whose bare names mean `tenant`."""

    tenant: str
    is_admin: bool

    def may_see(self, tenant: str) -> bool:
        """Whether that tenant's names exist for this caller."""
        return self.is_admin or tenant == self.tenant
