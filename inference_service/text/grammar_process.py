"""Checks constraints in a process that may die of them: `python -m inference_service.text.grammar_process`.

Reads questions on its standard input and answers on its standard output, each a length of 4 bytes and that
much JSON. A question that takes too much time or memory ends the process; `grammar_checker` knows what that
means and starts another. Ends with its parent, whose end closes the input.
"""

import ctypes
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

from inference_service.domain.structured_output import (
    Constraint,
    GrammarRefusedError,
    GrammarsUnavailableError,
)
from inference_service.text.grammar import CHECK_STACK_BYTES, GrammarCompiler, serialized_grammar

# What compiling one constraint may take. The node compiles it again for every answer: this bounds that, too.
CPU_LIMIT_S = 2
GROWTH_LIMIT_BYTES = 16 << 20
# Beyond this the process is ended while it works.
_ADDRESS_SPACE_BYTES = 512 << 20


class Launch(msgspec.Struct, frozen=True):
    """The process's one argument."""

    model_dir: str
    vocab_size: int
    end_token_ids: tuple[int, ...]


class Answer(msgspec.Struct, frozen=True):
    """Of one constraint; the first answer, to no question, says whether the process can work at all."""

    grammar: str = ""
    refusal: str = ""
    num_bytes: int = 0


class _Mallinfo2(ctypes.Structure):
    """Of glibc 2.33 and later, malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    )  # fmt: skip


def main(argv: list[str]) -> int:
    """Answer until the input ends; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A file of a gigabyte for each grammar that was too large would be the next problem.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    launch = msgspec.json.decode(argv[1], type=Launch)
    try:
        compiler = GrammarCompiler(Path(launch.model_dir), launch.vocab_size, launch.end_token_ids)
    except (GrammarsUnavailableError, ValueError, OSError) as error:
        _write(answers, Answer(refusal=str(error)))
        return 1
    _write(answers, Answer())
    status = 1

    def answer_all() -> None:
        nonlocal status
        while (question := _read(questions)) is not None:
            _write(answers, _answer(compiler, msgspec.json.decode(question, type=Constraint)))
        status = 0

    # The main thread's stack may have no limit at all; this one's is a fraction of any in the node.
    threading.stack_size(CHECK_STACK_BYTES)
    thread = threading.Thread(target=answer_all, name="answers")
    thread.start()
    thread.join()
    return status


def _answer(compiler: GrammarCompiler, constraint: Constraint) -> Answer:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    begun_s = usage.ru_utime + usage.ru_stime
    num_bytes = _allocated_bytes()
    _limit(resource.RLIMIT_CPU, int(begun_s) + CPU_LIMIT_S + 1)
    _limit(resource.RLIMIT_AS, _address_space_bytes() + _ADDRESS_SPACE_BYTES)
    try:
        grammar = serialized_grammar(constraint)
        matcher = compiler.compile(grammar)
    except GrammarRefusedError as error:
        return Answer(refusal=str(error))
    growth = _allocated_bytes() - num_bytes
    del matcher
    if growth > GROWTH_LIMIT_BYTES:
        return Answer(refusal=f"it takes {growth >> 20} MiB; the limit is {GROWTH_LIMIT_BYTES >> 20} MiB")
    return Answer(grammar=grammar, num_bytes=max(0, growth))


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _allocated_bytes() -> int:
    """What is allocated now; where the C library does not say, what is resident."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is not None:
        mallinfo.restype = _Mallinfo2
        allocated = mallinfo()
        return allocated.uordblks + allocated.hblkhd
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


def _read(stream: BinaryIO) -> bytes | None:
    header = stream.read(4)
    return stream.read(int.from_bytes(header, "little")) if len(header) == 4 else None


def _write(stream: BinaryIO, answer: Answer) -> None:
    body = msgspec.json.encode(answer)
    stream.write(len(body).to_bytes(4, "little") + body)
    stream.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
