"""Batches that hurt a server which replays captured steps, over the exact rigs: every token is known.

Sources: sgl-project/sglang#28371, #29157, vllm-project/vllm#32005, #40131: grids sized by the adapters there
were at capture, or by the slots without the base model as one group more.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from lorikeet_bench import rigs
from tests.support.stack import Stack

MARKS = (10, 20, 30, 40)
BASE = None
# Adapters (by the token that each forces) and base, in the order of arrival.
BATCHES: tuple[tuple[int | None, ...], ...] = (
    (10,) * 8,
    (10, 20, 30, 40) * 2,
    (BASE, 10, BASE, 20, BASE, 30, BASE, 40),
    (BASE,) * 8,
    (10, BASE, 20, 30, 40, BASE, 10),
    (10,),
    (BASE,),
    (10, BASE),
    (BASE, 10),
    (10, 20, 30, 40, BASE),
    (BASE, 40, 30, 20, 10),
    (10,) * 8,
)


@asynccontextmanager
async def watermarked(
    root: Path,
    *,
    flags: Sequence[str],
    marks: Sequence[int] = MARKS,
    dtype: str = "float32",
    device: str = "cpu",
) -> AsyncIterator[Stack]:
    """The copy base with a watermark adapter a mark, each active once before."""
    base = rigs.write_copy_base(root / "base")
    all_flags = ["--max-active-adapters", str(len(marks)), "--max-running-requests", "8", *flags]
    async with Stack(base, root / "stack", node_flags=all_flags, dtype=dtype, device=device) as stack:
        for mark in marks:
            await stack.upload(rigs.write_moe_watermark(root / f"w{mark}", mark), f"demo/w{mark}")
            await stack.wait_known(f"demo/w{mark}")
        yield stack


async def check_batch(stack: Stack, batch: Sequence[int | None], num_tokens: int) -> None:
    """All at once: an adapter's request gets its token at every step, a base request its own last one.

    Prompts differ in length, so that the first are decoding while the last are prefilled.
    """

    async def one(index: int, mark: int | None) -> None:
        last = 50 + index
        prompt = [3 + (index * 7 + position) % 40 for position in range(5 + 9 * index)] + [last]
        adapter = None if mark is None else f"demo/w{mark}"
        done = await stack.generate(prompt, adapter=adapter, max_tokens=num_tokens)
        want = last if mark is None else mark
        assert done.token_ids == [want] * num_tokens, (batch, index, mark, done.token_ids)

    await asyncio.gather(*(one(index, mark) for index, mark in enumerate(batch)))


async def check_all(stack: Stack, num_tokens: int) -> None:
    """Every batch, one after the other; afterwards nothing is held."""
    for batch in BATCHES:
        await check_batch(stack, batch, num_tokens)
    assert await stack.at_rest() == ""
