"""Changes adapters under the running streams: which operation when, drawn from a seed."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from lorikeet_bench.soak.operations import Operations
from lorikeet_bench.soak.roster import ALIASES, Member, Roster
from lorikeet_client import ResidencyState

_MAX_REVISIONS = 3


class Churner:
    """One of several; each works on one member at a time."""

    def __init__(
        self, seed: int, number: int, roster: Roster, operations: Operations, pause_s: float
    ) -> None:
        self._random = random.Random(f"{seed}/churn/{number}")  # noqa: S311 (a load, no secret)
        self._roster = roster
        self._operations = operations
        self._pause_s = pause_s

    async def run(self, until_s: float) -> None:
        """One operation after the other until then."""
        while time.monotonic() < until_s:
            free = [member for member in self._roster.members if not member.lock.locked()]
            if free:  # with few adapters the other churners may have them all
                member = self._random.choice(free)
                async with member.lock:
                    await self._step(member)
            await asyncio.sleep(self._random.uniform(0, 2 * self._pause_s))

    async def _step(self, member: Member) -> None:
        draw, does = self._random, self._operations
        if not member.digests:
            await does.push(member, draw.choice(member.palette))
            return
        if len(member.digests) > _MAX_REVISIONS:
            oldest = next(d for d in member.digests if d not in member.aliases.values())
            await does.delete_revision(member, oldest)
            return
        choices: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (0.30, lambda: self._replace(member)),
            (0.11, lambda: does.load(member, ResidencyState.ACTIVE)),
            (0.05, lambda: does.load(member, ResidencyState.HOST)),
            (0.15, lambda: does.unload(member)),
            # One at a time is pinned: it must let the next one have its turn.
            (0.50 if member.is_pinned else 0.08, lambda: self._pin(member)),
            (0.10, lambda: self._alias(member)),
            (0.08, lambda: does.delete(member)),
            (0.15, lambda: does.look(member)),
        ]
        act = draw.choices([act for _, act in choices], [weight for weight, _ in choices])[0]
        await act()

    async def _pin(self, member: Member) -> None:
        """One at a time: all that a pinned name and its aliases mean stays, and the others must have room."""
        if member.is_pinned:
            await self._operations.pin(member, pinned=False)
        elif not self._roster.is_pinning:
            self._roster.is_pinning = True
            try:
                if not any(other.is_pinned for other in self._roster.members):
                    await self._operations.pin(member, pinned=True)
            finally:
                self._roster.is_pinning = False

    async def _replace(self, member: Member) -> None:
        """Another content under the same name: a new one, or an older revision pushed again."""
        current = member.digests[-1]
        others = [content for content in member.palette if content.digest != current]
        content = self._random.choice(others)
        alias = ALIASES[0] if content is member.palette[0] else None
        await self._operations.push(member, content, alias)

    async def _alias(self, member: Member) -> None:
        alias = self._random.choice(ALIASES)
        if alias in member.aliases and self._random.random() < 0.4:
            await self._operations.remove_alias(member, alias)
        else:
            await self._operations.move_alias(member, alias, self._random.choice(member.digests))
