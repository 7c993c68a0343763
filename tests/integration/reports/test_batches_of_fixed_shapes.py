"""Steps that overlap and are brought to fixed shapes, as graphs are: adapters and base in any mixture.

See tests/support/fixed_batches.py for the sources; the same batches run over captured graphs in tests/gpu.
"""

from pathlib import Path

import pytest

from tests.support.fixed_batches import BATCHES, check_all, check_batch, watermarked


@pytest.mark.parametrize(
    "flags",
    [
        ["--overlap", "--graph-batch-sizes", "1,3,8", "--graph-token-counts", "48,256"],
        pytest.param(["--overlap"], marks=pytest.mark.long),
        pytest.param(["--no-overlap", "--graph-batch-sizes", "8"], marks=pytest.mark.long),
    ],
    ids=" ".join,
)
async def test_every_mixture(tmp_path: Path, flags: list[str]) -> None:
    """Adapter k's requests get k at every step, base requests copy."""
    async with watermarked(tmp_path, flags=flags) as stack:
        await check_all(stack, num_tokens=24)


@pytest.mark.long
async def test_one_slot_and_the_base(tmp_path: Path) -> None:
    """All slots active plus the base is one group more than there are slots."""
    flags = ["--overlap", "--graph-batch-sizes", "2,8"]
    async with watermarked(tmp_path, flags=flags, marks=(10,)) as stack:
        for batch in (b for b in BATCHES if set(b) <= {None, 10}):
            await check_batch(stack, batch, num_tokens=40)
