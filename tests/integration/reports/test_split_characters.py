"""Characters and stop strings spread over tokens come out whole, or not at all.

The successor table makes the base emit any sequence of distinct tokens; each token is a piece of bytes.
Sources: antonellof/ferrox#124, deepseek-ai/deepseek-recipe#16, timtoole02/Camelid#288.
"""

from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from lorikeet.inference.v1 import generation_pb2
from lorikeet_bench import rigs
from tests.support.stack import Completion, Stack, make_request

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAMILY = "👨\u200d👩\u200d👧".encode()
# Each chain is a list of byte pieces; a piece stands in one chain only, so that successors are unique.
CHAINS: dict[str, list[bytes]] = {
    "emoji": [
        b"family: ",
        FAMILY[:1],
        FAMILY[1:3],
        FAMILY[3:6],
        FAMILY[6:9],
        FAMILY[9:10],
        FAMILY[10:14],
        FAMILY[14:16],
        FAMILY[16:],
    ],
    "korean": [b"a \xed", b"\x95", b"\x9c", b" b"],
    "lone": [b"x", b"\xff", b"y"],
    "genuine": [b"end: ", b"\xef", b"\xbf\xbd"],
    "words": [b"Hello", b" STO", b"P here", b" and on"],
    "near": [b"one ST", b"OX two", b" three"],
}


class Book:
    """Token ids of the pieces, and the successor table that walks each chain."""

    def __init__(self) -> None:
        self.pieces = [piece for chain in CHAINS.values() for piece in chain]
        assert len(set(self.pieces)) == len(self.pieces)
        self.first = {name: self.pieces.index(chain[0]) for name, chain in CHAINS.items()}
        self.successor: dict[int, int] = {}
        for chain in CHAINS.values():
            ids = [self.pieces.index(p) for p in chain]
            self.successor |= dict(zip(ids, [*ids[1:], ids[0]], strict=True))


BOOK = Book()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A base that emits each chain's next piece, with a tokenizer of those pieces."""
    root = tmp_path_factory.mktemp("text")
    shape = rigs.RigShape(vocab=64)
    base = rigs.write_copy_base(root / "base", shape, successor=BOOK.successor)
    rigs.write_byte_tokenizer(base, shape.vocab, BOOK.pieces)
    async with Stack(base, root / "stack") as running:
        yield running


async def walk(stack: Stack, name: str, tokens: int, **sampling: object) -> tuple[Completion, list[str]]:
    """Emit `tokens` pieces of a chain after its first, which is the prompt, keeping each delta."""
    deltas: list[str] = []
    out = Completion()
    request = make_request([BOOK.first[name]], max_tokens=tokens, **sampling)
    async for piece in stack.inference().Generate(request, metadata=stack.auth(), timeout=20):
        deltas.append(piece.text_delta)
        out.token_ids += [t.id for t in piece.tokens]
        out.tokens += piece.tokens
        if piece.HasField("finish"):
            out.finish = piece.finish
    out.text = "".join(deltas)
    return out, deltas


def expected(token_ids: list[int]) -> str:
    """All bytes at once, decoded the way Python does it."""
    return b"".join(BOOK.pieces[t] for t in token_ids).decode("utf-8", "replace")


@pytest.mark.parametrize("name", ["emoji", "korean", "lone", "genuine"])
async def test_deltas_hold_whole_characters(stack: Stack, name: str) -> None:
    """Joined deltas equal the bytes decoded at once; no delta adds a replacement character."""
    length = len(CHAINS[name]) - 1
    out, deltas = await walk(stack, name, length)
    assert out.text == expected(out.token_ids)
    genuine = expected(out.token_ids).count("\ufffd")
    assert sum(d.count("\ufffd") for d in deltas) == genuine
    assert b"".join(t.text_bytes for t in out.tokens) == b"".join(BOOK.pieces[t] for t in out.token_ids)


@pytest.mark.parametrize("cut", range(1, len(CHAINS["emoji"])))
async def test_max_tokens_inside_a_character(stack: Stack, cut: int) -> None:
    """A cut tail becomes one U+FFFD at the end, as Python decodes it; the RPC stays valid."""
    out, deltas = await walk(stack, "emoji", cut)
    assert out.finish is not None
    assert out.finish.reason == generation_pb2.FINISH_REASON_LENGTH
    assert out.text == expected(out.token_ids)
    assert "\ufffd" not in "".join(deltas[:-1])


async def test_unary_says_the_same(stack: Stack) -> None:
    """Complete joins the same text."""
    request = make_request([BOOK.first["korean"]], max_tokens=3)
    reply = await stack.inference().Complete(
        generation_pb2.CompleteRequest(request=request), metadata=stack.auth(), timeout=20
    )
    assert reply.text == expected([t.id for t in reply.tokens])


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_over_tokens_is_caught_and_not_leaked(stack: Stack, include: bool) -> None:
    """The string "STOP" lies in two tokens; it and what follows are not shown, unless asked for."""
    out, deltas = await walk(stack, "words", 50, stop_strings=["STOP"], include_stop_string=include)
    assert out.text == (" STOP" if include else " ")
    assert out.finish is not None
    assert out.finish.reason == generation_pb2.FINISH_REASON_STOP_STRING
    assert out.finish.stop_string == "STOP"
    assert include or not any("S" in d for d in deltas)
    status = await stack.status()
    assert status.running_requests == 0


async def test_a_near_miss_is_given_back(stack: Stack) -> None:
    """What was held back for "STOP" is shown once "STOX" follows, and at the end of the text."""
    out, _ = await walk(stack, "near", 2, stop_strings=["STOP", "two three four"])
    assert out.text == "OX two three"
    held, _ = await walk(stack, "words", 1, stop_strings=["STOP"])
    assert held.text == " STO"


async def test_stop_token_and_ignore(stack: Stack) -> None:
    """A stop token ends the text and is named; its text is not shown."""
    second = BOOK.pieces.index(CHAINS["words"][2])
    out, _ = await walk(stack, "words", 50, stop_token_ids=[second])
    assert out.finish is not None
    assert out.finish.reason == generation_pb2.FINISH_REASON_STOP_TOKEN
    assert out.finish.stop_token_id == second
    assert out.text == " STO"


async def test_bytes_outside_the_tokenizer_are_refused(stack: Stack) -> None:
    """A prompt token beyond the vocabulary is named."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stack.generate([64], max_tokens=1)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "64" in str(error.value.details())
