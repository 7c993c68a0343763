"""Detokenizing and stop strings, against plain whole-text references."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_service.domain.sampling import SamplingParams
from inference_service.text.detokenizer import Detokenizer
from inference_service.text.output_text import OutputText
from inference_service.text.stop_strings import StopStringMatcher
from inference_service.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import make_byte_tokenizer

_FIXTURES = Path(__file__).parents[3] / "fixtures"
_BYTES = make_byte_tokenizer()
_REPLACEMENT = "\ufffd"


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@given(st.lists(st.integers(0, 255), max_size=60))
def test_any_bytes_equal_decoding_all_at_once(ids: list[int]) -> None:
    """The pieces, joined, are Python's own decoding of the whole byte string."""
    assert "".join(_pieces(_BYTES, ids)) == bytes(ids).decode("utf-8", "replace")


@given(st.text(max_size=40))
def test_valid_text_never_shows_a_replacement(text: str) -> None:
    """While the text is valid, no piece has a half character, and nothing is left at the end."""
    pieces = _pieces(_BYTES, list(text.encode()))
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert all(piece == "" or piece in text for piece in pieces)


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        (b"\xff", [_REPLACEMENT, ""]),
        (b"\xef\xbf\xbd", ["", "", _REPLACEMENT, ""]),
        (b"\xf0\x9f\x9a", ["", "", "", _REPLACEMENT]),
        (b"\xe6a", ["", _REPLACEMENT + "a", ""]),
        ("👩\u200d🚀".encode(), ["", "", "", "👩", "", "", "\u200d", "", "", "", "🚀", ""]),
        ("한".encode(), ["", "", "한", ""]),
    ],
)
def test_hard_characters(data: bytes, pieces: list[str]) -> None:
    """Lone bytes at once, a genuine U+FFFD when complete, a cut tail once at the end, ZWJ emoji by parts."""
    assert _pieces(_BYTES, list(data)) == pieces


def test_golden_stream() -> None:
    """The golden stream of byte-splitting tokens: whole characters, the same text."""
    stream = json.loads((_FIXTURES / "golden" / "tokenizer.json").read_text())["stream"]
    tokenizer = Tokenizer.from_directory(_FIXTURES / "models" / "qwen3_moe")
    pieces = _pieces(tokenizer, stream["ids"])
    assert "".join(pieces) == stream["text"]
    assert all(_REPLACEMENT not in piece for piece in pieces)
    for count, prefix in enumerate(stream["prefixes"], start=1):
        assert "".join(pieces[:count]) == prefix.rstrip(_REPLACEMENT)


def test_special_tokens_are_skipped_or_shown() -> None:
    """A special token between a character's bytes does not break it when it is skipped."""
    first, second = "é".encode()
    assert "".join(_pieces(_BYTES, [first, 256, second])) == "é"
    shown = Detokenizer(_BYTES, skip_special_tokens=False)
    assert shown.push(256) == "<|end|>"


def _reference(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """Look after every character; the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            stop = max(ending, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def _scan(pieces: list[str], stops: list[str], *, include: bool) -> tuple[str, str | None]:
    matcher = StopStringMatcher(stops, include_stop_string=include)
    shown = ""
    for piece in pieces:
        scan = matcher.push(piece)
        shown += scan.text
        if scan.stop_string is not None:
            return shown, scan.stop_string
    return shown + matcher.finish(), None


_letters = st.text(alphabet="ab", max_size=12)


@given(
    st.lists(st.text(alphabet="ab", max_size=4), max_size=8),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.booleans(),
)
def test_stop_strings_do_not_depend_on_the_cuts(pieces: list[str], stops: list[str], include: bool) -> None:
    """Whatever the pieces are, the result is that of looking after every character."""
    expected = _reference("".join(pieces), stops, include=include)
    assert _scan(pieces, stops, include=include) == expected


@given(_letters, st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_nothing_is_held_back_without_need(text: str, stops: list[str]) -> None:
    """What is held back is always the beginning of some stop string, and nothing longer was possible."""
    matcher = StopStringMatcher(stops, include_stop_string=False)
    seen = ""
    for character in text:
        scan = matcher.push(character)
        seen += scan.text
        if scan.stop_string is not None:
            return
    held = matcher.finish()
    assert seen + held == text
    assert held == "" or any(s.startswith(held) for s in stops)


def test_a_stop_string_over_tokens_is_never_leaked() -> None:
    """No part of "STOP" is shown before the whole is there."""
    text = OutputText(_BYTES, SamplingParams(max_tokens=9, stop_strings=("STOP",)))
    shown = [text.push(b) for b in b"say STO STOP!"]
    at = next(i for i, scan in enumerate(shown) if scan.stop_string)
    assert "".join(s.text for s in shown[: at + 1]) == "say STO "
    assert shown[at].stop_string == "STOP"
    assert "ST" not in "".join(s.text for s in shown[:6])


def test_a_stop_string_inside_a_character_s_bytes() -> None:
    """Multi-byte stop strings are found when their last byte arrives."""
    text = OutputText(_BYTES, SamplingParams(max_tokens=9, stop_strings=("東京",), include_stop_string=True))
    scans = [text.push(b) for b in "x東京".encode()]
    assert "".join(s.text for s in scans) == "x東京"
    assert scans[-1].stop_string == "東京"


@given(
    st.lists(st.text(alphabet="ab", max_size=4), max_size=8),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.integers(0, 5),
)
def test_min_tokens_come_before_any_stop_string(pieces: list[str], stops: list[str], min_tokens: int) -> None:
    """As if looked for after every character of the later pieces: one may begin before and end there."""
    text = "".join(pieces)
    early = len("".join(pieces[:min_tokens]))
    expected: tuple[str, str | None] = (text, None)
    for end in range(early + 1, len(text) + 1):
        if ending := [s for s in stops if text[:end].endswith(s)]:
            stop = max(ending, key=len)
            expected = (text[: end - len(stop)], stop)
            break
    matcher = StopStringMatcher(stops, include_stop_string=False)
    shown, found = "", None
    for index, piece in enumerate(pieces):
        scan = matcher.push(piece, may_stop=index >= min_tokens)
        shown, found = shown + scan.text, scan.stop_string
        if found is not None:
            break
    else:
        shown += matcher.finish()
    assert found == expected[1]
    # Text shown before the stop string may begin is shown for good; no more of it than that is.
    assert shown == expected[0]


def test_min_tokens_of_a_request() -> None:
    """The same through the tokens; the third completes the string."""
    text = OutputText(_BYTES, SamplingParams(max_tokens=9, stop_strings=("aa",), min_tokens=2))
    scans = [text.push(ord("a")) for _ in range(3)]
    assert "".join(scan.text for scan in scans) == "a"
    assert [scan.stop_string for scan in scans] == [None, None, "aa"]


def test_held_text_is_shown_at_the_end() -> None:
    """The beginning of a stop string that never completed belongs to the answer."""
    text = OutputText(_BYTES, SamplingParams(max_tokens=9, stop_strings=("STOP",)))
    shown = "".join(text.push(b).text for b in b"the ST")
    assert shown + text.finish().text == "the ST"


def test_the_cut_tail_may_complete_a_stop_string() -> None:
    """U+FFFD that only the end makes is text like any other."""
    text = OutputText(_BYTES, SamplingParams(max_tokens=9, stop_strings=(_REPLACEMENT,)))
    assert text.push(0xF0).text == ""
    assert text.finish().stop_string == _REPLACEMENT
