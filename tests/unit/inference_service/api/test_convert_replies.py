"""Conversion of replies: no field is forgotten, every piece within its bound."""

import dataclasses

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from inference_service.api import convert
from inference_service.api.generation_piece import (
    MAX_PIECE_BYTES,
    GenerationFinish,
    GenerationPiece,
    ServedAdapter,
    TokenPiece,
)
from inference_service.domain.adapter import ResidencyTier
from inference_service.domain.engine import EngineStatus
from inference_service.domain.request import FinishReason, RequestTimings, TokenLogprobs
from lorikeet.inference.v1 import generation_pb2
from lorikeet_contract.names import AdapterName
from tests.support.fake_engine import make_info

INFO = make_info()


def unset_fields(message: Message, path: str = "") -> list[str]:
    """Names of all fields, at any depth, that have no value other than their default."""
    missing: list[str] = []
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        here = f"{path}{field.name}"
        if field.is_repeated:
            if not value:
                missing.append(here)
            elif field.message_type:
                missing += unset_fields(value[0], f"{here}.")
        elif field.message_type:
            missing += unset_fields(value, f"{here}.") if message.HasField(field.name) else [here]
        elif not value:
            missing.append(here)
    return missing


FULL_FINISH = GenerationFinish(
    FinishReason.STOP_STRING, "END", 7, 3, 2, 4, RequestTimings(1, 2, 3, 4),
    ServedAdapter(AdapterName("acme", "pirate"), "1" * 64), ResidencyTier.ACTIVE,
)  # fmt: skip
FULL_TOKEN = TokenPiece(65, b"A", TokenLogprobs.of(-0.5, (66,), (-1.5,)))
FULL_PIECE = GenerationPiece("text", (FULL_TOKEN,), (FULL_TOKEN,), FULL_FINISH, index=1)
FIRST_PIECE = dataclasses.replace(FULL_PIECE, index=0)


def test_no_field_of_a_reply_is_forgotten() -> None:
    """Every field of every reply is filled from a value that has them all."""
    status = EngineStatus(*range(1, 1 + len(dataclasses.fields(EngineStatus))))
    model = convert.model_response(INFO, "i-1", status)
    assert unset_fields(convert.generate_response("r", 1, FULL_PIECE)) == []
    assert unset_fields(convert.complete_response("r", [FULL_PIECE, FIRST_PIECE])) == []
    assert unset_fields(convert.tokenize_response([1], [b"x"], "r")) == []
    # A site outside the layers, one slice, no experts: these are empty by nature.
    assert {f.rpartition(".")[2] for f in unset_fields(model)} == {
        "num_layers", "layer", "num_experts", "name", "fused_parameter", "base_weight_dtype",
        "base_weight_sha256",
    }  # fmt: skip
    shown = {f.name: getattr(model.status, f.name) for f in dataclasses.fields(status)}
    assert shown == dataclasses.asdict(status)
    limits = dataclasses.asdict(INFO.limits)
    assert {
        f.name: getattr(model.limits, f.name) for f in model.limits.DESCRIPTOR.fields
    }.items() <= limits.items()


@pytest.mark.parametrize("reason", [r for r in FinishReason if r is not FinishReason.FAILED])
def test_every_finish_reason_has_its_value(reason: FinishReason) -> None:
    """Names agree; FAILED never reaches a reply, it is a status."""
    piece = GenerationPiece(finish=GenerationFinish(reason))
    finish = convert.generate_response("r", 0, piece).finish
    assert generation_pb2.FinishReason.Name(finish.reason) == f"FINISH_REASON_{reason.name}"
    assert not finish.HasField("adapter")
    assert not finish.HasField("stop_token_id")


_tokens = st.lists(
    st.builds(
        TokenPiece,
        id=st.integers(0, 2**18),
        text_bytes=st.binary(max_size=20),
        logprobs=st.sampled_from([0, 1, 3000, 40_000]).map(
            lambda n: TokenLogprobs.of(-1.0, (2**18,) * n, (-1.5,) * n)
        ),
    ),
    max_size=12,
).map(tuple)


@given(_tokens, _tokens, st.text(max_size=10))
def test_split_pieces_join_to_the_whole(
    prompt: tuple[TokenPiece, ...], tokens: tuple[TokenPiece, ...], text: str
) -> None:
    """Nothing lost, nothing twice, in order; the finish last; each part within its bound."""
    whole = GenerationPiece(text, tokens, prompt, FULL_FINISH)
    parts = list(whole.split())
    assert tuple(t for p in parts for t in p.tokens) == tokens
    assert tuple(t for p in parts for t in p.prompt_tokens) == prompt
    assert "".join(p.text for p in parts) == text
    assert [p.finish for p in parts] == [None] * (len(parts) - 1) + [FULL_FINISH]
    for part in parts:
        assert part.max_wire_bytes <= MAX_PIECE_BYTES or len(part.tokens) + len(part.prompt_tokens) == 1


@given(
    st.builds(TokenPiece, st.integers(0, 2**32 - 1), st.binary(max_size=300)),
    st.integers(0, 50),
)
def test_wire_size_is_never_underestimated(token: TokenPiece, top: int) -> None:
    """The bound that keeps messages small holds for real messages."""
    token = dataclasses.replace(token, logprobs=TokenLogprobs.of(-9.0, (2**28 - 1,) * top, (-1.5,) * top))
    message = convert.generate_response("", 0, GenerationPiece(tokens=(token,)))
    assert message.ByteSize() <= token.max_wire_bytes
