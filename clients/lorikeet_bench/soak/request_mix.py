"""What the streams ask: drawn from a seed and the roster as it is at that moment."""

import itertools
import random

from lorikeet_bench.soak.exchange import Asked, Ending
from lorikeet_bench.soak.plan import SOAK_SHAPE, SUCCESSOR
from lorikeet_bench.soak.roster import ALIASES, Roster

_PREFIX_LENGTHS = (0, 0, 15, 16, 48, 130, 400)
_TAIL_LENGTHS = (0, 1, 3, 9)
_MAX_TOKENS = (1, 2, 5, 16, 16, 40, 120)
_ENDINGS = {
    Ending.RUN: 0.56,
    Ending.SLOW: 0.05,
    Ending.CANCEL: 0.15,
    Ending.ABORT: 0.05,
    Ending.DEADLINE: 0.15,
    Ending.DISCONNECT: 0.04,
}
_BASE_SHARE = 0.12
_UNKNOWN_SHARE = 0.03
_ALIAS_SHARE = 0.15
_REVISION_SHARE = 0.08
# Of those by alias or revision, how many are taken from what stands; the others may name nothing.
_STANDING_SHARE = 0.8
_STOP_TOKEN_SHARE = 0.05
# Far too short for anything, too short for most, and rarely enough on a busy machine.
_DEADLINES_S = ((0.001, 0.02), (0.05, 0.3), (0.3, 2.0))


class RequestMix:
    """One stream's requests."""

    def __init__(self, seed: int, stream: int, roster: Roster) -> None:
        self._random = random.Random(f"{seed}/{stream}")  # noqa: S311 (a load, no secret)
        # The same prefixes for all streams and all adapters, or no cache could be mixed up.
        shared = random.Random(seed)  # noqa: S311
        self._prefixes = [tuple(_tokens(shared, length)) for length in _PREFIX_LENGTHS]
        self._roster = roster
        self._stream = stream
        self._numbers = itertools.count()

    def draw(self) -> Asked:
        """The next request."""
        draw = self._random
        tail = _tokens(draw, draw.choice(_TAIL_LENGTHS) + 1)
        prompt = (*draw.choice(self._prefixes), *tail)
        ending = draw.choices(list(_ENDINGS), list(_ENDINGS.values()))[0]
        max_tokens = draw.choice(_MAX_TOKENS)
        reference = self._reference()
        # On the ring of the base any token comes within a round; an adapter says its own token alone.
        stop = draw.randrange(1, SOAK_SHAPE.vocab) if draw.random() < _STOP_TOKEN_SHARE else None
        return Asked(
            request_id=f"soak-{self._stream}-{next(self._numbers)}",
            reference=reference,
            prompt=prompt,
            max_tokens=max_tokens,
            ending=ending,
            after_tokens=draw.randrange(max_tokens + 1),
            deadline_s=draw.uniform(*draw.choice(_DEADLINES_S)) if ending is Ending.DEADLINE else None,
            stop_token=stop,
        )

    def uniform(self, low: float, high: float) -> float:
        """A pause of this stream."""
        return self._random.uniform(low, high)

    def _reference(self) -> str | None:
        draw, roster = self._random, self._roster
        share = draw.random()
        if share < _BASE_SHARE:
            return None
        member = draw.choices(roster.members, roster.weights)[0]
        if share < _BASE_SHARE + _UNKNOWN_SHARE:
            return draw.choice(
                [
                    f"{member.name.tenant}/nobody-{draw.randrange(100)}",
                    member.alias_reference("nobody"),
                    member.revision_reference(f"{draw.getrandbits(256):064x}"),
                ]
            )
        kind, is_standing = draw.random(), draw.random() < _STANDING_SHARE
        if kind < _ALIAS_SHARE:
            aliases = sorted(member.aliases) if is_standing and member.aliases else ALIASES
            return member.alias_reference(draw.choice(aliases))
        if kind < _ALIAS_SHARE + _REVISION_SHARE:
            any_digest = [content.digest for content in member.palette]
            digests = member.digests if is_standing and member.digests else any_digest
            return member.revision_reference(draw.choice(digests))
        return member.reference


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.choice(list(SUCCESSOR)) for _ in range(count)]
