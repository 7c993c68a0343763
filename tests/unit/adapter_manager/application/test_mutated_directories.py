"""Adapter directories damaged at random: taken as what they mean, or refused by name; nothing else happens.

Each seed makes one directory: a fixture or a tiny adapter in any layout, with one to four mutations of its
configuration, tensors, headers, bytes or files. It comes in as a directory or as an upload. Then
- the stored payload is the function that an independent reading of the files gives, or a typed error names
  what is wrong in text that is safe to show;
- registry, artifact store, staging area, the directory itself and its surroundings are as before;
- it takes less than 2 s of processor time and less than 1 GiB above the files' size.
`python -m tests.support.fuzz.child DIR SEED SEED+1 1` repeats one.
"""

from pathlib import Path

import pytest

from tests.support.fuzz.adapter_draft import read_draft
from tests.support.fuzz.campaign import Tally, run_campaign
from tests.support.fuzz.drafts import make_draft
from tests.support.fuzz.sources import sources
from tests.support.fuzz.world import FuzzWorld

FIRST_LONG_SEED = 100_000
NUM_LONG = 20_000


def check(tally: Tally, count: int, keep: Path) -> None:
    """Nothing failed; both ends occur, and nearly all that loads was compared."""
    print(tally.line())
    shown = "\n\n".join(
        f"seed {seed}, {make_draft(seed).source}, {make_draft(seed).recipe}:\n{why}"
        for seed, why in sorted(tally.failures.items())[:10]
    )
    assert not tally.failures, f"{len(tally.failures)} failed; they are kept in {keep}\n{shown}"
    assert tally.total == count
    assert {"loaded", "INVALID_ADAPTER", "UNSUPPORTED_ADAPTER"} <= tally.outcomes.keys()
    loaded = tally.outcomes["loaded"]
    assert loaded > 0.15 * count
    assert tally.compared > 0.9 * loaded


def test_a_seed_makes_the_same_directory_every_time() -> None:
    """Or a seed in a log would be worth nothing."""
    for seed in range(60):
        first, second = make_draft(seed), make_draft(seed)
        assert first.recipe == second.recipe
        assert first.files == second.files
    assert len({tuple(make_draft(seed).recipe) for seed in range(60)}) > 50


async def test_a_rank_that_is_not_served_leaves_nothing(tmp_path: Path) -> None:
    """Whichever way it came in, resumable or not: to send the same files again would not help."""
    source = next(s for s in sources() if s.name.endswith("qv-r64"))
    world = FuzzWorld(tmp_path)
    await world.start()
    for seed in range(20):  # which draw the way in
        draft = read_draft(source.model, source.name, source.config, source.weights)
        draft.serialise()
        draft.finish()
        assert (await world.run(seed, draft)).kind == "LIMIT_EXCEEDED"


@pytest.mark.timeout(300)
def test_some_mutated_directories(tmp_path: Path) -> None:
    """A sample for every run."""
    check(run_campaign(0, 500, workers=2, keep=tmp_path / "failed"), 500, tmp_path / "failed")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_thousand_mutated_directories(tmp_path: Path) -> None:
    """The whole campaign."""
    tally = run_campaign(FIRST_LONG_SEED, NUM_LONG, workers=2, keep=tmp_path / "failed")
    check(tally, NUM_LONG, tmp_path / "failed")
