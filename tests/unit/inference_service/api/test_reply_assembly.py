"""Engine outputs made into pieces, without an engine."""

from typing import Any

from inference_service.api.generation_piece import GenerationPiece
from inference_service.api.reply_assembly import ReplyAssembly
from inference_service.domain.request import FinishReason, RequestFinish, RequestOutput, TokenLogprobs
from inference_service.domain.sampling import SamplingParams
from tests.support.byte_tokenizer import make_byte_tokenizer

TOKENIZER = make_byte_tokenizer()


def assembly(**sampling: Any) -> ReplyAssembly:
    """For the prompt "ab"."""
    return ReplyAssembly(TOKENIZER, (97, 98), SamplingParams(max_tokens=99, **sampling), None)


def output(data: bytes, reason: FinishReason | None = None) -> RequestOutput:
    """Several tokens at once, as a backlog is merged."""
    return RequestOutput("r", tuple(data), finish=RequestFinish(reason) if reason else None)


def test_tokens_after_a_stop_string_are_dropped() -> None:
    """In the same output and in later ones; the finish is STOP_STRING even where the engine says LENGTH."""
    reply = assembly(stop_strings=("END",))
    first = reply.push(output(b"textENDmore"))
    assert isinstance(first, GenerationPiece)
    assert (first.text, len(first.tokens), first.finish) == ("text", 7, None)
    assert reply.is_stopped
    assert reply.push(output(b"even more")) is None
    last = reply.push(output(b"x", FinishReason.LENGTH))
    assert last is not None
    assert last.finish is not None
    assert (last.text, last.tokens) == ("", ())
    assert (last.finish.reason, last.finish.stop_string) == (FinishReason.STOP_STRING, "END")
    assert last.finish.output_tokens == 7


def test_a_stop_string_completed_by_the_last_token() -> None:
    """Found together with the engine's own finish."""
    last = assembly(stop_strings=("END",)).push(output(b"the END", FinishReason.LENGTH))
    assert last is not None
    assert last.finish is not None
    assert (last.text, last.finish.reason) == ("the ", FinishReason.STOP_STRING)


def test_held_back_text_comes_with_the_finish() -> None:
    """The beginning of a stop string is shown once nothing can follow."""
    reply = assembly(stop_strings=("END",))
    first = reply.push(output(b"the EN"))
    assert first is not None
    assert first.text == "the "
    last = reply.push(output(b"", FinishReason.ABORTED))
    assert last is not None
    assert last.text == "EN"


def test_log_probabilities_stay_with_their_tokens() -> None:
    """One entry a token, for output and prompt; the prompt's first token has none."""
    entries = (TokenLogprobs.of(-1.0, (5,), (-0.5,)), TokenLogprobs(-2.0))
    reply = assembly(logprobs=1, prompt_logprobs=0)
    news = RequestOutput("r", (120, 121), entries, (None, TokenLogprobs(-3.0)))
    (prompt,) = reply.prompt_pieces(news)
    piece = reply.push(news)
    assert piece is not None
    assert [(t.id, t.logprobs) for t in piece.tokens] == [(120, entries[0]), (121, entries[1])]
    assert [(t.id, t.logprobs) for t in prompt.prompt_tokens] == [(97, None), (98, TokenLogprobs(-3.0))]


def test_long_prompts_come_in_parts() -> None:
    """All tokens, in order, each with its own entry; a few hundred at a time."""
    ids = tuple(i % 256 for i in range(1000))
    reply = ReplyAssembly(TOKENIZER, ids, SamplingParams(max_tokens=1, prompt_logprobs=0), None)
    entries = (None, *(TokenLogprobs(-float(i)) for i in range(1, 1000)))
    pieces = list(reply.prompt_pieces(RequestOutput("r", prompt_logprobs=entries)))
    assert max(len(p.prompt_tokens) for p in pieces) <= 256
    assert [(t.id, t.logprobs) for p in pieces for t in p.prompt_tokens] == list(
        zip(ids, entries, strict=True)
    )


def test_an_output_without_news_is_no_piece() -> None:
    """Nothing is sent for it."""
    assert assembly().push(RequestOutput("r")) is None


def test_usage_falls_back_to_what_is_known_here() -> None:
    """A request that ended before the engine counted its prompt still reports it."""
    last = assembly().push(output(b"", FinishReason.DEADLINE))
    assert last is not None
    assert last.finish is not None
    assert (last.finish.prompt_tokens, last.finish.output_tokens) == (2, 0)
