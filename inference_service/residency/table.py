"""All revisions that residency is concerned with, the catalog behind them, and the news of their changes."""

from collections.abc import Iterable

from inference_service.domain.adapter import (
    AdapterDemand,
    AdapterSource,
    DesiredAdapter,
    ResidencyTier,
    ResidentAdapter,
)
from inference_service.domain.engine_report import LoadStage
from inference_service.domain.errors import AdapterTooLargeError, AdapterUnavailableError
from inference_service.residency.config import ResidencyConfig
from inference_service.residency.entry import AdapterEntry
from inference_service.residency.load_stats import LoadStats
from lorikeet_contract.status import ServiceError

# Bounds how long after its files were mended an adapter still fails.
_MAX_RETRY_S = 30.0


class AdapterTable:
    """Entries by digest. `is_dirty` says that something changed which may let another step be taken."""

    def __init__(self, config: ResidencyConfig, unix_offset_s: float) -> None:
        self.entries: dict[str, AdapterEntry] = {}
        self.is_dirty = True
        self.demands: list[AdapterDemand] = []
        self.load_stats = LoadStats()
        self._config = config
        self._unix_offset_s = unix_offset_s
        self._catalog: dict[str, DesiredAdapter] = {}
        self._changed: dict[str, None] = {}

    def entry(self, digest: str) -> AdapterEntry | None:
        """The entry of a revision, made now if the catalog names it."""
        entry = self.entries.get(digest)
        if entry is None and (wanted := self._catalog.get(digest)):
            entry = self.make(wanted.source)
            entry.desired, entry.pinned = wanted.tier, wanted.pinned
        return entry

    def make(self, source: AdapterSource) -> AdapterEntry:
        """A new entry for a revision that has none."""
        assert source.digest not in self.entries
        entry = self.entries[source.digest] = AdapterEntry(source.digest, source)
        self.is_dirty = True
        return entry

    def set_catalog(self, desired: Iterable[DesiredAdapter]) -> None:
        """Replace what the manager wants; entries follow, whatever they are doing."""
        self._catalog = {wanted.source.digest: wanted for wanted in desired}
        for digest, entry in self.entries.items():
            wanted = self._catalog.get(digest)
            before = entry.pinned
            entry.is_named = wanted is not None
            entry.desired = wanted.tier if wanted else ResidencyTier.ABSENT
            entry.pinned = wanted.pinned if wanted else False
            entry.awaits_stream = False
            if wanted is not None:
                entry.source = wanted.source
            if entry.pinned != before:
                self.changed(entry)
        for digest, wanted in self._catalog.items():
            if wanted.tier in {ResidencyTier.HOST, ResidencyTier.ACTIVE}:
                self.entry(digest)
        self.is_dirty = True

    def changed(self, entry: AdapterEntry) -> None:
        """Note that observers are to hear of the entry's present state."""
        self._changed[entry.digest] = None
        self.is_dirty = True

    def take_changed(self) -> list[ResidentAdapter]:
        """The present state of every entry that changed since the last call."""
        changed, self._changed = self._changed, {}
        return [self.describe(digest) for digest in changed]

    def describe(self, digest: str) -> ResidentAdapter:
        """A revision's state as others may see it."""
        entry = self.entries.get(digest)
        if entry is None:
            return ResidentAdapter(digest, ResidencyTier.ABSENT)
        used_s = entry.last_used_s
        return ResidentAdapter(
            digest=digest,
            tier=entry.tier,
            pinned=entry.pinned,
            leases=len(entry.leases),
            payload_bytes=entry.source.payload_bytes,
            arena_bytes=entry.num_bytes if entry.slot is not None else 0,
            last_used_unix_s=used_s + self._unix_offset_s if used_s else 0.0,
            failure=entry.failure.message if entry.failure else "",
        )

    def fail(self, entry: AdapterEntry, stage: LoadStage, error: ServiceError, now_s: float) -> None:
        """Record a failed load: who waits fails, and nobody tries again before the cool-down."""
        self.load_stats.failed(stage, error.reason)
        if not isinstance(error, AdapterTooLargeError):
            error = AdapterUnavailableError(f"adapter {entry.digest} could not be loaded: {error.message}")
        entry.failure = error
        entry.num_failures += 1
        cool_down_s = min(self._config.load_retry_s * 2 ** (entry.num_failures - 1), _MAX_RETRY_S)
        entry.retry_at_s = now_s + cool_down_s
        self.end_calls(entry, error)
        self.changed(entry)

    def end_calls(self, entry: AdapterEntry, error: ServiceError) -> None:
        """Tell everyone who waits for a tier that it will not come."""
        calls, entry.calls = entry.calls, []
        for call in calls:
            call.on_done(error)

    def forget_idle(self) -> None:
        """Drop entries that hold nothing and want nothing."""
        for digest in [d for d, entry in self.entries.items() if entry.is_forgettable]:
            del self.entries[digest]
