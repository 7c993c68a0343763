"""The adapters of a soak as the churn last left them. The churn alone writes; drawing requests reads."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from lorikeet_bench.soak.contents import Content, ContentKind, ContentPool
from lorikeet_contract.names import AdapterName, parse_reference

# Each adapter's revisions come from a few contents of its own, so that what the registry remembers of
# uploads for a day stops growing early.
_PER_KIND = 2
ALIASES = ("prod", "canary")


@dataclass(slots=True)
class Member:
    """One adapter. `digests` are its standing revisions, the one that its bare name means at the end."""

    name: AdapterName
    palette: Sequence[Content]
    digests: list[str] = field(default_factory=list[str])
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    is_pinned: bool = False
    # One operation at a time, so that the order of its writes is known.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def reference(self) -> str:
        """The bare name."""
        return self.name.short

    def alias_reference(self, alias: str) -> str:
        """The name by an alias."""
        return f"{self.name.short}@{alias}"

    def revision_reference(self, digest: str) -> str:
        """The name of one revision."""
        return self.name.revision(digest)


def revision_reference(reference: str, digest: str) -> str:
    """The name of a revision of the adapter that any form of reference names."""
    return parse_reference(reference).name.revision(digest)


class Roster:
    """All members, in a fixed order."""

    def __init__(self, tenant: str, count: int, pool: ContentPool) -> None:
        self.members = tuple(
            Member(AdapterName(tenant, f"soak-{number:02}"), _palette(pool, number))
            for number in range(count)
        )
        # Somebody is about to pin: two at once would not see each other.
        self.is_pinning = False
        # Popularity falls with the number, as tenants' does.
        self.weights = [1 / (number + 1) ** 0.7 for number in range(count)]

    def standing(self) -> int:
        """How many adapters there are now."""
        return sum(bool(member.digests) for member in self.members)


def _palette(pool: ContentPool, number: int) -> Sequence[Content]:
    """Contents with different tokens; few are shared between adapters, so that a mix-up shows."""
    by_kind = {
        kind: sorted((c for c in pool.contents if c.kind is kind), key=lambda c: c.token)
        for kind in ContentKind
    }
    half = len(by_kind[ContentKind.EXPERTS]) // 2
    starts = {ContentKind.EXPERTS: 0, ContentKind.VALUES: half}
    return [
        contents[(starts[kind] + _PER_KIND * number + n) % len(contents)]
        for kind, contents in by_kind.items()
        for n in range(_PER_KIND)
    ]
