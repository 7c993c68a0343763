"""Checks constraints before their requests are accepted, in a process of its own.

A thread that compiles a hostile schema can be neither stopped nor kept from taking memory, and an abort in
native code would end the node. The process starts with the first constraint and goes with the node. One
constraint is compiled at a time, and one tenant has one of them in hand or in front of the others: what a
tenant's constraints take, others wait for once at most. One whose caller left before its turn is not
compiled. What was checked is remembered.
"""

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from inference_service.domain.errors import NotReadyError, QueueFullError
from inference_service.domain.structured_output import (
    CheckedGrammar,
    Constraint,
    GrammarRefusedError,
    GrammarsUnavailableError,
)
from inference_service.text.grammar import missing_library
from inference_service.text.grammar_process import CPU_LIMIT_S, Answer, Launch

_MAX_REMEMBERED = 256
_MAX_WAITING_OF_TENANT = 256
# Far beyond what the limit of processor time allows, on whatever machine.
_LONGEST_S = 120.0
# What a constraint is told that ended the process, by the exit status.
_TOO_DEEP = "its rules or expressions depend on each other too deeply; flatten it"
_REFUSALS = {
    -signal.SIGXCPU: f"compiling it takes more than {CPU_LIMIT_S} s",
    -signal.SIGABRT: "compiling it takes too much memory",  # what Rust does where it gets none
    -signal.SIGSEGV: _TOO_DEEP,  # the end of the stack
    -signal.SIGBUS: _TOO_DEEP,
}

log = structlog.get_logger()


class GrammarChecker:
    """One a node, for its event loop."""

    def __init__(self, model_dir: Path, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._launch = Launch(str(model_dir.resolve()), vocab_size, tuple(end_token_ids))
        self._process: asyncio.subprocess.Process | None = None
        self._remembered: OrderedDict[bytes, Answer] = OrderedDict()
        self._turn = asyncio.Lock()
        self._tenants: dict[str, asyncio.Lock] = {}
        self._num_waiting: Counter[str] = Counter()
        self._checks: set[asyncio.Task[Answer]] = set()
        self._in_hand: asyncio.Task[Answer] | None = None

    async def check(self, constraint: Constraint, tenant: str) -> CheckedGrammar:
        """The grammar of a constraint.

        Raises:
            GrammarRefusedError: it is invalid or takes too much.
            GrammarsUnavailableError: this node or its model cannot do structured output.
            QueueFullError: too many of the tenant's constraints wait already.
            NotReadyError: the process was ended from outside.
        """
        key = hashlib.sha256(msgspec.json.encode(constraint)).digest()
        answer = self._remembered.get(key)
        if answer is None:
            if reason := missing_library():
                raise GrammarsUnavailableError(reason)
            check = asyncio.create_task(self._check(key, constraint, tenant))
            self._checks.add(check)
            check.add_done_callback(self._forget)
            try:
                answer = await asyncio.shield(check)
            except asyncio.CancelledError:
                # A caller that leaves does not stop the process in its work: the next would wait for another.
                if check is not self._in_hand:
                    check.cancel()
                raise
        else:
            self._remembered.move_to_end(key)
        if answer.refusal:
            raise GrammarRefusedError(answer.refusal)
        return CheckedGrammar(answer.grammar, answer.num_bytes)

    async def close(self) -> None:
        """End the process."""
        for check in tuple(self._checks):
            check.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)
        await self._end()

    def _forget(self, check: asyncio.Task[Answer]) -> None:
        self._checks.discard(check)
        if not check.cancelled():
            check.exception()  # seen, though the caller may have left: asyncio would log it else

    async def _check(self, key: bytes, constraint: Constraint, tenant: str) -> Answer:
        if self._num_waiting[tenant] >= _MAX_WAITING_OF_TENANT:
            raise QueueFullError(
                f"{_MAX_WAITING_OF_TENANT} constraints of this tenant wait to be compiled",
                metadata={
                    "field": "sampling.structured_output",
                    "limit": "max_waiting_constraints",
                    "value": str(self._num_waiting[tenant] + 1),
                    "maximum": str(_MAX_WAITING_OF_TENANT),
                },
                retry_after_s=1.0,
            )
        self._num_waiting[tenant] += 1
        try:
            async with self._tenants.setdefault(tenant, asyncio.Lock()), self._turn:
                self._in_hand = asyncio.current_task()
                answer = self._remembered.get(key) or await self._ask(constraint)
                self._remembered[key] = answer
                if len(self._remembered) > _MAX_REMEMBERED:
                    self._remembered.popitem(last=False)
                return answer
        finally:
            self._num_waiting[tenant] -= 1
            if not self._num_waiting[tenant]:
                del self._num_waiting[tenant], self._tenants[tenant]

    async def _ask(self, constraint: Constraint) -> Answer:
        if self._process is not None and self._process.returncode is not None:
            await self._end()
        process = self._process or await self._start()
        assert process.stdin is not None
        body = msgspec.json.encode(constraint)
        try:
            async with asyncio.timeout(_LONGEST_S):
                process.stdin.write(len(body).to_bytes(4, "little") + body)
                await process.stdin.drain()
                return await _answer(process)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            status = await self._end()
            log.warning("grammar.check_ended", exit_status=status, kind=constraint.kind.value)
            if status in {0, -signal.SIGKILL, -signal.SIGTERM}:  # not of itself
                raise NotReadyError("the process that checks grammars was ended", retry_after_s=1.0) from None
            return Answer(refusal=_REFUSALS.get(status, f"compiling it fails (status {status})"))
        except BaseException:
            await self._end()
            raise

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "inference_service.text.grammar_process",
            msgspec.json.encode(self._launch).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Its last words would be a backtrace of native code in the midst of our log lines.
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        try:
            ready = await _answer(process)
        except asyncio.IncompleteReadError as error:
            # It said nothing of this node or its model: nothing is known to be wrong for good.
            status = await self._end()
            log.warning("grammar.check_ended", exit_status=status, kind="")
            raise NotReadyError(
                f"the process that checks grammars ended at its start, with status {status}",
                retry_after_s=1.0,
            ) from error
        except BaseException:
            await self._end()
            raise
        if ready.refusal:
            await self._end()
            raise GrammarsUnavailableError(ready.refusal)
        return process

    async def _end(self) -> int:
        """Make an end of the process, whatever it does; its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(1.0):
                return await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            return await process.wait()


async def _answer(process: asyncio.subprocess.Process) -> Answer:
    assert process.stdout is not None
    header = await process.stdout.readexactly(4)
    return msgspec.json.decode(
        await process.stdout.readexactly(int.from_bytes(header, "little")), type=Answer
    )
