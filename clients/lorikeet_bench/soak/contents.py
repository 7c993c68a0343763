"""The weights that a soak uploads: watermark adapters, each with the one token it forces and its digest."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lorikeet_bench.rigs import write_kv_watermark, write_moe_watermark
from lorikeet_bench.soak.plan import SOAK_SHAPE, SUCCESSOR
from lorikeet_client import AsyncLorikeet

# The layouts in which people have experts; all become the same canonical payload.
_LAYOUTS = ("fused", "per-expert", "w123")
_CONCURRENT = 4


class ContentKind(StrEnum):
    """Where the watermark sits: in the experts, or in the values that the KV cache keeps."""

    EXPERTS = "experts"
    VALUES = "values"


@dataclass(frozen=True, slots=True)
class Content:
    """One adapter directory. Whatever it is asked, it answers with `token` alone."""

    directory: Path
    kind: ContentKind
    token: int
    digest: str


class ContentPool:
    """All contents of a soak, by digest."""

    def __init__(self, contents: Sequence[Content]) -> None:
        self.contents = tuple(contents)
        self._by_digest: Mapping[str, Content] = {content.digest: content for content in contents}
        if len(self._by_digest) < len(self.contents):
            raise ValueError("two different contents have one digest")

    def token(self, digest: str) -> int | None:
        """What a revision answers with; None for a digest that this soak never uploaded."""
        content = self._by_digest.get(digest)
        return content.token if content else None


async def write_contents(client: AsyncLorikeet, root: Path, name: str) -> ContentPool:
    """Write two adapters for each token, and learn their digests by having the manager check them.

    Args:
        client: of a tenant that may upload.
        root: where the directories go.
        name: an adapter's name for the checks; nothing is stored under it.
    """
    limit = asyncio.Semaphore(_CONCURRENT)

    async def make(kind: ContentKind, token: int) -> Content:
        directory = root / f"{kind}-{token}"
        # The base's head turns what an adapter writes into its successor, as it does for the base itself.
        source = next(before for before, after in SUCCESSOR.items() if after == token)
        async with limit:
            if kind is ContentKind.EXPERTS:
                layout = _LAYOUTS[token % len(_LAYOUTS)]
                await asyncio.to_thread(write_moe_watermark, directory, source, SOAK_SHAPE, layout=layout)
            else:
                await asyncio.to_thread(write_kv_watermark, directory, source, SOAK_SHAPE)
            result = await client.upload_adapter(directory, name, validate_only=True)
        return Content(directory, kind, token, result.revision.digest)

    made = [make(kind, token) for token in sorted(SUCCESSOR.values()) for kind in ContentKind]
    return ContentPool(await asyncio.gather(*made))
