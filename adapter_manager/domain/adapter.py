"""An adapter's record and its life: PENDING -> READY -> DELETING, or FAILED. Pure transitions, no clock."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from adapter_manager.domain.errors import LimitExceededError
from adapter_manager.domain.probe import Probe
from lorikeet_contract.names import AdapterName

# Every record and every catalog entry carries all aliases of its adapter.
MAX_ALIASES = 100


class RevisionState(StrEnum):
    """Where a revision is in its life. FAILED is the contract's; an upload that fails leaves no revision."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
    DELETING = "deleting"


class WantedTier(StrEnum):
    """How near to the device somebody asked to have a revision."""

    HOST = "host"
    ACTIVE = "active"


@dataclass(frozen=True, slots=True)
class Revision:
    """One immutable set of weights under an adapter's name.

    `pending_owner` is the manager that is storing it: after a crash that manager knows the work as its own.
    """

    digest: str
    state: RevisionState
    create_time_s: float
    payload_bytes: int
    dtype: str
    max_rank: int
    base_digest: str
    failure: str = ""
    pending_owner: str = ""
    wanted: WantedTier | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A name that points at revisions, the one promoted last at the end.

    A push of content that is there already promotes it again, so the bare name answers with what was
    pushed last, not with what was new last.
    """

    tenant: str
    adapter: str
    create_time_s: float
    update_time_s: float
    revisions: tuple[Revision, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    is_pinned: bool = False

    @property
    def name(self) -> AdapterName:
        """The parsed resource name."""
        return AdapterName(self.tenant, self.adapter)

    @property
    def ready(self) -> tuple[Revision, ...]:
        """Revisions that may serve."""
        return tuple(r for r in self.revisions if r.state is RevisionState.READY)

    @property
    def current_digest(self) -> str:
        """What the bare name answers with; empty while nothing is READY."""
        ready = self.ready
        return ready[-1].digest if ready else ""

    def revision(self, digest: str) -> Revision | None:
        """The revision of that digest, whatever its state."""
        return next((r for r in self.revisions if r.digest == digest), None)

    def alias(self, alias: str) -> str | None:
        """The digest an alias points at."""
        return dict(self.aliases).get(alias)

    def with_pending(self, revision: Revision, now_s: float) -> "Adapter":
        """A copy in which `revision` is PENDING (a FAILED one of the same digest starts again)."""
        others = tuple(r for r in self.revisions if r.digest != revision.digest)
        return replace(self, revisions=(*others, revision), update_time_s=now_s)

    def with_ready(self, digest: str, aliases: Iterable[str], now_s: float) -> "Adapter":
        """A copy in which the revision is READY and promoted, and `aliases` point at it (LimitExceededError).

        Where somebody asked for the former current revision on the nodes, they asked for the name: the wish
        goes over to the new one, unless an alias still answers with the former.
        """
        merged = dict(self.aliases) | dict.fromkeys(aliases, digest)
        former = self.revision(self.current_digest)
        revision = self._known(digest)
        others = tuple(r for r in self.revisions if r.digest != digest)
        if former and former.digest != digest and former.wanted and former.digest not in merged.values():
            revision = replace(revision, wanted=former.wanted)
            others = tuple(replace(r, wanted=None) if r.digest == former.digest else r for r in others)
        ready = replace(revision, state=RevisionState.READY, failure="", pending_owner="")
        return replace(self, revisions=(*others, ready), aliases=_sorted_aliases(merged), update_time_s=now_s)

    def with_deleting(self, digests: Iterable[str], now_s: float) -> "Adapter":
        """A copy in which the revisions are DELETING, serve no more, and no alias points at them."""
        gone = frozenset(digests)
        return replace(
            self,
            revisions=tuple(
                replace(r, state=RevisionState.DELETING, wanted=None, pending_owner="")
                if r.digest in gone
                else r
                for r in self.revisions
            ),
            aliases=tuple((a, d) for a, d in self.aliases if d not in gone),
            update_time_s=now_s,
        )

    def without(self, digests: Iterable[str], now_s: float) -> "Adapter":
        """A copy that has forgotten the revisions."""
        gone = frozenset(digests)
        return replace(
            self,
            revisions=tuple(r for r in self.revisions if r.digest not in gone),
            aliases=tuple((a, d) for a, d in self.aliases if d not in gone),
            update_time_s=now_s,
        )

    def with_pin(self, is_pinned: bool, now_s: float) -> "Adapter":
        """A copy that is pinned or not; it follows the current revision."""
        return replace(self, is_pinned=is_pinned, update_time_s=now_s)

    def with_alias(self, alias: str, digest: str, now_s: float) -> "Adapter":
        """A copy whose alias points at `digest` (LimitExceededError); an empty one removes the alias."""
        merged = dict(self.aliases)
        merged.pop(alias, None)
        if digest:
            merged[alias] = digest
        return replace(self, aliases=_sorted_aliases(merged), update_time_s=now_s)

    def with_wanted(self, digest: str, wanted: WantedTier | None, now_s: float) -> "Adapter":
        """A copy that wants the revision at a tier on the nodes, or no longer."""
        return self._replaced(replace(self._known(digest), wanted=wanted), now_s)

    def _known(self, digest: str) -> Revision:
        revision = self.revision(digest)
        assert revision is not None, "callers look the revision up first"
        return revision

    def _replaced(self, revision: Revision, now_s: float) -> "Adapter":
        return replace(
            self,
            revisions=tuple(revision if r.digest == revision.digest else r for r in self.revisions),
            update_time_s=now_s,
        )


def check_num_aliases(count: int) -> None:
    """Raise LimitExceededError where one adapter would have more than MAX_ALIASES."""
    if count > MAX_ALIASES:
        raise LimitExceededError(
            f"max_aliases: an adapter has at most {MAX_ALIASES} aliases, this would be {count}; remove some",
            metadata={"limit": "max_aliases", "value": str(count), "maximum": str(MAX_ALIASES)},
        )


def _sorted_aliases(aliases: dict[str, str]) -> tuple[tuple[str, str], ...]:
    check_num_aliases(len(aliases))
    return tuple(sorted(aliases.items()))


@dataclass(frozen=True, slots=True)
class DigestUse:
    """Which adapters, of any tenant, hold a digest's files in the artifact store.

    Nobody: the files are due for removal. `purge_owner` is set while a manager removes them, and keeps new
    uploads of the same content waiting, so that a removal never takes files that somebody just stored.
    `probe` is what a node found out about the content; it goes with the files.
    """

    digest: str
    holders: tuple[str, ...] = ()
    purge_owner: str = ""
    purge_time_s: float = 0.0
    probe: Probe | None = None

    def held_by(self, holder: str) -> "DigestUse":
        """A copy that `holder` also holds."""
        return replace(self, holders=tuple(sorted({*self.holders, holder})))

    def with_probe(self, probe: Probe) -> "DigestUse":
        """A copy that knows what a node found."""
        return replace(self, probe=probe)

    def released_by(self, holder: str) -> "DigestUse":
        """A copy that `holder` no longer holds."""
        return replace(self, holders=tuple(h for h in self.holders if h != holder))


@dataclass(frozen=True, slots=True)
class UploadReceipt:
    """What an upload with a request id ended in, so that its repeat ends in the same revision."""

    tenant: str
    request_id: str
    adapter: str
    fingerprint: str
    files: tuple[tuple[str, int], ...]
    digest: str
    create_time_s: float
