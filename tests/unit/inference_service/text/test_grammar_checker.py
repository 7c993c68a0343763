"""The process that checks grammars: what it refuses, what ends it, what is remembered."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from inference_service.domain.errors import NotReadyError, QueueFullError
from inference_service.domain.structured_output import (
    CheckedGrammar,
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


async def test_callers_that_leave_before_their_turn(tmp_path: Path) -> None:
    """Theirs are not compiled, and lock nobody of their tenant out."""
    checker = make_checker(tmp_path)
    try:
        await checker.check(GOOD, "a")
        in_hand = asyncio.create_task(checker.check(ENDLESS, "a"))
        await eventually(checker._turn.locked)
        left = [
            asyncio.create_task(checker.check(Constraint(ConstraintKind.REGEX, f"a{n}"), "a"))
            for n in range(grammar_checker._MAX_WAITING_OF_TENANT - 1)
        ]
        await eventually(lambda: checker._num_waiting["a"] == grammar_checker._MAX_WAITING_OF_TENANT)
        for check in left:
            check.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await eventually(lambda: checker._num_waiting["a"] == 1)
        last = asyncio.create_task(checker.check(Constraint(ConstraintKind.REGEX, "last"), "a"))
        with pytest.raises(GrammarRefusedError):
            await in_hand
        assert await last
        # The first, the one in hand, and the last.
        assert len(checker._remembered) == 3
    finally:
        await checker.close()


@pytest.mark.parametrize("stack", ["8192", "unlimited"])
async def test_rules_that_lie_too_deep(stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What overflows the stack is refused for that, however large the main thread's may be."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nulimit -s {stack}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(grammar_checker.sys, "executable", str(script))
    checker = make_checker(tmp_path)
    try:
        assert await checker.check(_rules(300), "a")
        with pytest.raises(GrammarRefusedError, match="too deeply"):
            await checker.check(_rules(4000), "a")
        assert await checker.check(_rules(301), "a")
    finally:
        await checker.close()


def _rules(depth: int) -> Constraint:
    """Rules that name each other in turn."""
    rules = "\n".join(f'r{i}: "(" r{i - 1}? ")"' for i in range(1, depth + 1))
    return Constraint(ConstraintKind.GRAMMAR, f'start: r{depth}\nr0: "a"\n{rules}\n')


async def test_a_process_that_is_killed_as_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """UNAVAILABLE: it has said nothing against this node; the next try is served."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nkill -9 $$\n")
    script.chmod(0o755)
    checker = make_checker(tmp_path)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(grammar_checker.sys, "executable", str(script))
            with pytest.raises(NotReadyError, match="at its start") as caught:
                await checker.check(GOOD, "a")
        assert caught.value.retry_after_s
        assert await checker.check(GOOD, "a")
    finally:
        await checker.close()


async def test_the_size_of_a_grammar(tmp_path: Path) -> None:
    """Told with it, remembered or not, also where the memory of one before is used again."""
    texts = json.dumps({"enum": [f"some value number {i} of it" for i in range(5000)]})
    large = Constraint(ConstraintKind.JSON_SCHEMA, texts)
    checker = make_checker(tmp_path)
    try:
        small = (await checker.check(GOOD, "a")).num_bytes
        assert (await checker.check(large, "a")).num_bytes > 1 << 20 > small > 0
        again = Constraint(ConstraintKind.JSON_SCHEMA, texts.replace("some", "a"))
        assert (await checker.check(again, "a")).num_bytes > 1 << 20
        assert (await checker.check(GOOD, "a")).num_bytes == small
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
        assert [type(end) for end in ends] == [CheckedGrammar, CheckedGrammar, QueueFullError]
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
