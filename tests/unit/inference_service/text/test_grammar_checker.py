"""The process that checks grammars: what it refuses, what ends it, what is remembered."""

import asyncio
from pathlib import Path

import pytest

from inference_service.domain.errors import NotReadyError, QueueFullError
from inference_service.domain.structured_output import (
    Constraint,
    ConstraintKind,
    GrammarRefusedError,
    GrammarsUnavailableError,
)
from inference_service.text import grammar_checker
from inference_service.text.grammar_checker import GrammarChecker
from tests.support.grammar_models import model_dirs
from tests.support.waiting import eventually

GOOD = Constraint(ConstraintKind.REGEX, "[a-z]+")
BAD = Constraint(ConstraintKind.REGEX, "(")
# llguidance builds an automaton of a state for each remainder: minutes, and gigabytes.
ENDLESS = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 99999989}')


def make_checker(root: Path) -> GrammarChecker:
    """Of the model with merges."""
    model_dir, end = model_dirs(root)["merges"]
    return GrammarChecker(model_dir, 533, (end,))


async def test_one_process_for_many(tmp_path: Path) -> None:
    """Good and bad ones in turn; what was checked is remembered, refusals too."""
    checker = make_checker(tmp_path)
    try:
        grammars = [await checker.check(GOOD, "a")]
        process = checker._process
        assert process is not None
        for _ in range(2):
            with pytest.raises(GrammarRefusedError, match="unclosed group"):
                await checker.check(BAD, "a")
        assert checker._process is process
        assert len(checker._remembered) == 2
        process.kill()
        await process.wait()
        grammars.append(await checker.check(GOOD, "b"))  # remembered: nobody is asked
        assert grammars[0] == grammars[1]
        assert await checker.check(Constraint(ConstraintKind.JSON_OBJECT), "a")  # by another process
        assert checker._process is not process
    finally:
        await checker.close()


@pytest.mark.long
async def test_endless_work_is_ended(tmp_path: Path) -> None:
    """A limit of processor time; another tenant waits for one constraint of a hostile one, not for all."""
    checker = make_checker(tmp_path)
    try:
        await checker.check(GOOD, "other")
        ends: list[str] = []

        async def refused(number: int) -> None:
            text = ENDLESS.text.replace("99999989", str(99999989 + number))
            with pytest.raises(GrammarRefusedError, match=r"more than 2 s|memory"):
                await checker.check(Constraint(ConstraintKind.JSON_SCHEMA, text), "hostile")
            ends.append("hostile")

        async def served() -> None:
            assert await checker.check(Constraint(ConstraintKind.REGEX, "x+"), "other")
            ends.append("other")

        hostile = [asyncio.create_task(refused(number)) for number in range(3)]
        await asyncio.sleep(0)  # theirs come first
        await asyncio.gather(served(), *hostile)
        assert ends.index("other") <= 1
        # What was refused is known now.
        with pytest.raises(GrammarRefusedError):
            await asyncio.wait_for(checker.check(ENDLESS, "third"), 60)
    finally:
        await checker.close()


async def test_a_process_that_is_killed(tmp_path: Path) -> None:
    """UNAVAILABLE, for it was not the grammar's fault; the next try has another process."""
    checker = make_checker(tmp_path)
    try:
        await checker.check(GOOD, "a")
        process = checker._process
        assert process is not None
        checking = asyncio.create_task(checker.check(ENDLESS, "a"))
        await eventually(checker._turn.locked)
        process.kill()
        with pytest.raises(NotReadyError):
            await checking
        assert await checker.check(Constraint(ConstraintKind.REGEX, "b"), "a")
    finally:
        await checker.close()


async def test_a_caller_that_leaves(tmp_path: Path) -> None:
    """The answer is kept for the next; the process goes on."""
    checker = make_checker(tmp_path)
    try:
        leaving = asyncio.create_task(checker.check(GOOD, "a"))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert await checker.check(GOOD, "a")
        assert not checker._num_waiting
        assert not checker._tenants
    finally:
        await checker.close()


async def test_a_tenants_queue_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it RESOURCE_EXHAUSTED; others are not concerned."""
    monkeypatch.setattr(grammar_checker, "_MAX_WAITING_OF_TENANT", 2)
    checker = make_checker(tmp_path)
    try:
        checks = [
            asyncio.create_task(checker.check(Constraint(ConstraintKind.REGEX, f"a{n}"), "a"))
            for n in range(3)
        ]
        other = asyncio.create_task(checker.check(GOOD, "b"))
        ends = await asyncio.gather(*checks, return_exceptions=True)
        assert [type(end) for end in ends] == [str, str, QueueFullError]
        assert await other
    finally:
        await checker.close()


async def test_no_tokenizer(tmp_path: Path) -> None:
    """The process says why it cannot work, each time it is asked."""
    checker = GrammarChecker(tmp_path, 300, (1,))
    try:
        for _ in range(2):
            with pytest.raises(GrammarsUnavailableError, match=r"tokenizer\.json"):
                await checker.check(GOOD, "a")
    finally:
        await checker.close()


async def test_close_while_it_works(tmp_path: Path) -> None:
    """Ending a node waits for no grammar."""
    checker = make_checker(tmp_path)
    await checker.check(GOOD, "a")
    process = checker._process
    assert process is not None
    checking = asyncio.create_task(checker.check(ENDLESS, "a"))
    await eventually(checker._turn.locked)
    await checker.close()
    assert process.returncode is not None
    with pytest.raises(asyncio.CancelledError):
        await checking
