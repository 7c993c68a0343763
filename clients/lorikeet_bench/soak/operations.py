"""The operations of the churn: each writes the journal before it is sent and settles it when acknowledged."""

import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lorikeet_bench.soak.contents import Content
from lorikeet_bench.soak.exchange import Fault, FaultKind
from lorikeet_bench.soak.journal import Journal, Write
from lorikeet_bench.soak.outage import Outage
from lorikeet_bench.soak.roster import Member
from lorikeet_bench.soak.tally import Tally
from lorikeet_client import (
    AsyncLorikeet,
    CallError,
    ConflictError,
    InvalidRequestError,
    LimitError,
    NotFoundError,
    ResidencyState,
    UnavailableError,
)

# The manager acknowledges a write after this long even if a node has not taken it yet; so an answer that came
# sooner means that the node has. A deletion also waits for the weights to leave the node.
_CATCH_UP_S = 2.0
_DELETION_S = 5.0
# A node that was late has taken the write by then.
_LATE_S = 15.0
_TIMEOUT_S = 90.0
# Refused before anything was changed.
_CERTAIN = (InvalidRequestError, NotFoundError, ConflictError, LimitError)


@dataclass(frozen=True, slots=True)
class _Change:
    """What an operation will have written once it is done."""

    reference: str
    digest: str | None


class Operations:
    """Sends operations. The caller holds the member's lock."""

    def __init__(self, client: AsyncLorikeet, journal: Journal, tally: Tally, outage: Outage) -> None:
        self._client = client
        self._journal = journal
        self._tally = tally
        self._outage = outage

    async def push(self, member: Member, content: Content, alias: str | None = None) -> None:
        """A new revision, or a standing one again: the bare name means it from then on."""
        digest = content.digest
        kind = "create" if not member.digests else "push again" if digest in member.digests else "replace"
        changes = [
            _Change(member.reference, digest),
            _Change(member.revision_reference(digest), digest),
            *([_Change(member.alias_reference(alias), digest)] if alias else []),
        ]
        async with self._writing(kind, changes, _CATCH_UP_S) as done:
            result = await self._client.upload_adapter(
                content.directory,
                member.reference,
                aliases=(alias,) if alias else (),
                timeout_s=_TIMEOUT_S,
            )
            done.append("new" if result.created else "there already")
        if not done:
            return
        if result.revision.digest != digest:
            self._lost(member, f"{content.directory.name} became {result.revision.digest}, not {digest}")
        member.digests = [d for d in member.digests if d != digest] + [digest]
        if alias:
            member.aliases[alias] = digest

    async def delete(self, member: Member) -> None:
        """The adapter with everything."""
        changes = [
            _Change(member.reference, None),
            *(_Change(member.revision_reference(digest), None) for digest in member.digests),
            *(_Change(member.alias_reference(alias), None) for alias in member.aliases),
        ]
        async with self._writing("delete", changes, _DELETION_S) as done:
            await self._client.delete_adapter(member.reference, timeout_s=_TIMEOUT_S)
            done.append("done")
        if done:
            member.digests, member.aliases, member.is_pinned = [], {}, False

    async def delete_revision(self, member: Member, digest: str) -> None:
        """One revision, to which no alias points and which is not the last."""
        changes = [_Change(member.revision_reference(digest), None)]
        async with self._writing("delete a revision", changes, _DELETION_S) as done:
            await self._client.delete_adapter(member.revision_reference(digest), timeout_s=_TIMEOUT_S)
            done.append("done")
        if done:
            member.digests.remove(digest)

    async def move_alias(self, member: Member, alias: str, digest: str) -> None:
        """Point an alias at a standing revision."""
        async with self._writing(
            "move an alias", [_Change(member.alias_reference(alias), digest)], _CATCH_UP_S
        ) as done:
            await self._client.set_alias(member.reference, alias, digest, timeout_s=_TIMEOUT_S)
            done.append("done")
        if done:
            member.aliases[alias] = digest

    async def remove_alias(self, member: Member, alias: str) -> None:
        """Take an alias away."""
        async with self._writing(
            "remove an alias", [_Change(member.alias_reference(alias), None)], _CATCH_UP_S
        ) as done:
            await self._client.set_alias(member.reference, alias, "", timeout_s=_TIMEOUT_S)
            done.append("done")
        if done:
            del member.aliases[alias]

    async def load(self, member: Member, tier: ResidencyState) -> None:
        """Bring the current revision near; a node that is full may say no."""
        async with self._writing(f"load to {tier}", [], 0) as done:
            placements = await self._client.load_adapter(member.reference, tier, timeout_s=_TIMEOUT_S)
            failures = [p.failure for p in placements if p.failure]
            done.append(_why_not_loaded(failures[0]) if failures else "done")

    async def unload(self, member: Member) -> None:
        """Take it off the nodes; a pinned one must be refused."""
        expected = "REVISION_IN_USE" if member.is_pinned else ""
        async with self._writing("unload", [], 0, expected) as done:
            placements = await self._client.unload_adapter(member.reference, timeout_s=_TIMEOUT_S)
            done.append("in use" if any(p.failure for p in placements) else "done")

    async def pin(self, member: Member, *, pinned: bool) -> None:
        """Pin or unpin."""
        async with self._writing("pin" if pinned else "unpin", [], 0) as done:
            await self._client.pin_adapter(member.reference, pinned=pinned, timeout_s=_TIMEOUT_S)
            done.append("done")
        if done:
            member.is_pinned = pinned

    async def look(self, member: Member) -> None:
        """The registry must show exactly what was acknowledged."""
        async with self._writing("look", [], 0) as done:
            found = await self._client.get_adapter(member.reference, timeout_s=_TIMEOUT_S)
            done.append("done")
        if not done:
            return
        shown = (found.current_digest, {r.digest for r in found.revisions}, found.aliases, found.pinned)
        known = (member.digests[-1], set(member.digests), member.aliases, member.is_pinned)
        if shown != known:
            self._lost(member, f"the registry shows {shown}, acknowledged was {known}")

    @asynccontextmanager
    async def _writing(
        self, kind: str, changes: Sequence[_Change], bound_s: float, expected: str = ""
    ) -> AsyncGenerator[list[str]]:
        """Journal one operation. The body appends its outcome; after a refusal the list stays empty."""
        begin_s = time.monotonic()
        writes = [(c.reference, self._journal.begin(c.reference, c.digest, begin_s)) for c in changes]
        done: list[str] = []
        try:
            yield done
        except CallError as error:
            self._failed(kind, error, writes, expected)
            if isinstance(error, UnavailableError):
                self._outage.unavailable()
            return
        self._outage.answered()
        end_s = time.monotonic()
        settled_s = end_s if end_s - begin_s < bound_s else end_s + _LATE_S
        for _, write in writes:
            write.settled_s = settled_s
        self._tally.churned(kind, done[0] + (" late" if writes and settled_s > end_s else ""))

    def _failed(
        self, kind: str, error: CallError, writes: Sequence[tuple[str, Write]], expected: str
    ) -> None:
        is_certain = isinstance(error, _CERTAIN)
        for reference, write in writes:
            if is_certain:
                self._journal.refused(reference, write)
            else:
                write.settled_s = math.inf
        if error.reason == expected:
            self._tally.churned(kind, "refused, rightly")
            return
        self._tally.churned(kind, error.code.name)
        self._tally.fault(
            Fault(
                FaultKind.FAILED_OPERATION,
                f"{kind} failed: {error.code.name} {error.reason}: {error.message}",
                time.monotonic(),
                {
                    "in doubt": not is_certain,
                    "writes": [f"{reference}: {write}" for reference, write in writes],
                    "metadata": error.metadata,
                },
            )
        )

    def _lost(self, member: Member, message: str) -> None:
        facts: dict[str, object] = {
            "adapter": member.reference,
            "history": [str(write) for write in self._journal.history(member.reference)[-8:]],
        }
        self._tally.fault(Fault(FaultKind.LOST_WRITE, message, time.monotonic(), facts))


def _why_not_loaded(failure: str) -> str:
    return "no room" if "do not fit" in failure else failure
