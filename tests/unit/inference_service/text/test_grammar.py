"""Token masks against every token of the vocabulary, tried by another expression engine; what is refused."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex

from inference_service.domain.structured_output import (
    Constraint,
    ConstraintKind,
    GrammarRefusedError,
    GrammarsUnavailableError,
)
from inference_service.text import grammar as grammar_module
from inference_service.text.grammar import GrammarCompiler, Matcher, missing_library, serialized_grammar
from inference_service.text.tokenizer import Tokenizer
from tests.support.grammar_models import make_compiler

MODELS = ("bytes", "sentencepiece", "merges", "harmony", "storyteller")
# Byte expressions, so that parts of characters count; each matches no more than a few dozen bytes.
EXPRESSIONS = (
    "[a-f]{2,9}x?",
    "(the|then|there|thus)( end)?[.!]",
    "(true|false|[0-9]{1,3})",
    " ?h?i{1,3}",
    "(é|ü|€|😀){1,3}",
    '"[^"\\n]{0,9}"',
)


def allowed(matcher: Matcher, vocab_size: int) -> set[int]:
    """Tokens that may come next."""
    mask = np.zeros((1, -(-vocab_size // 32)), np.int32)
    matcher.fill_masks([matcher], mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little")).tolist())


def viable(expression: "regex.Pattern[bytes]", text: bytes) -> bool:
    """Whether the text can go on to a match, by the regex package."""
    return expression.fullmatch(text, partial=True) is not None


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_masks_along_random_answers(model: str, expression: str, tmp_path: Path) -> None:
    """At each step the mask has exactly the tokens that lead on, or the one of them that is forced.

    Byte expressions of `regex` see bytes where llguidance keeps to UTF-8: a class of all but a few characters
    is compared where those are ASCII.
    """
    compiler, tokenizer, end = make_compiler(tmp_path, model)
    vocab_size = tokenizer.vocab_size + 21
    grammar = serialized_grammar(Constraint(ConstraintKind.REGEX, expression))
    oracle = regex.compile(expression.encode())
    draw = random.Random(0)
    for _ in range(3):
        matcher, text = compiler.compile(grammar), b""
        while True:
            mask = allowed(matcher, vocab_size)
            tried = {
                token_id
                for token_id in range(tokenizer.vocab_size)
                if not tokenizer.is_special(token_id)
                and viable(oracle, text + tokenizer.token_bytes(token_id))
            }
            if "[^" in expression:  # llguidance keeps to UTF-8, the oracle's bytes do not
                tried = {i for i in tried if (text + tokenizer.token_bytes(i)).isascii()}
                mask = {i for i in mask if (text + tokenizer.token_bytes(i)).isascii()}
            is_complete = oracle.fullmatch(text) is not None
            assert (end in mask) == is_complete, text
            tokens = mask - {end}
            assert tokens <= tried, text
            assert tokens == tried or (len(mask) == 1 and not is_complete), (text, tried - tokens)
            token_id = draw.choice(sorted(mask))
            matcher.advance([token_id])
            if token_id == end:
                break
            text += tokenizer.token_bytes(token_id)
        assert oracle.fullmatch(text)


@pytest.mark.parametrize("model", MODELS)
def test_first_masks_are_llguidances_own(model: str, tmp_path: Path) -> None:
    """Every token of the vocabulary is tried alone; a forced token is one of those."""
    compiler, tokenizer, _ = make_compiler(tmp_path, model)
    for constraint in (
        Constraint(ConstraintKind.JSON_OBJECT),
        Constraint(ConstraintKind.JSON_SCHEMA, '{"type": ["number", "boolean", "array"]}'),
        Constraint(ConstraintKind.GRAMMAR, "start: (WORD | /[0-9]+/)+\nWORD: /[A-Za-z]+ ?/"),
        Constraint(ConstraintKind.CHOICE, choices=("abc", "abd", "x", "été")),
    ):
        matcher = compiler.compile(serialized_grammar(constraint))
        mask = allowed(matcher, tokenizer.vocab_size + 21)
        tried = {i for i in range(tokenizer.vocab_size) if matcher.inner.validate_tokens([i]) == 1}
        assert mask
        assert mask == tried or (len(mask) == 1 and mask < tried)


@pytest.mark.parametrize("vocab_size", [533, 512, 400, 100])
def test_only_tokens_that_both_know(vocab_size: int, tmp_path: Path) -> None:
    """A wildcard allows neither the padding of a larger head nor what a smaller one lacks."""
    compiler, tokenizer, end = make_compiler(tmp_path, "merges", vocab_size=vocab_size)
    matcher = compiler.compile(serialized_grammar(Constraint(ConstraintKind.GRAMMAR, "start: <[*]> /a/")))
    mask = allowed(matcher, vocab_size)
    assert mask == set(range(min(vocab_size, tokenizer.vocab_size))) - {end}
    padding = Constraint(ConstraintKind.GRAMMAR, "start: <[515-530]>")
    with pytest.raises(GrammarRefusedError):
        compiler.compile(serialized_grammar(padding))


def test_special_tokens_in_grammars(tmp_path: Path) -> None:
    """Harmony's channels by name; nothing but the grammar brings them."""
    compiler, tokenizer, end = make_compiler(tmp_path, "harmony")
    names = {tokenizer.token_bytes(i).decode(): i for i in range(256, tokenizer.vocab_size)}
    text = 'start: <|channel|> "final" <|message|> BODY\nBODY: /[a-z]{3}/'
    matcher = compiler.compile(serialized_grammar(Constraint(ConstraintKind.GRAMMAR, text)))
    size = tokenizer.vocab_size + 21
    assert allowed(matcher, size) == {names["<|channel|>"]}
    matcher.advance([names["<|channel|>"], *b"final", names["<|message|>"]])
    assert allowed(matcher, size) == set(b"abcdefghijklmnopqrstuvwxyz")
    matcher.advance(b"xyz")
    assert allowed(matcher, size) == {end}


def test_the_documented_grammar_of_channels(tmp_path: Path) -> None:
    """docs/inference.md's for gpt-oss takes a whole answer, with reasoning before the JSON."""
    text = (Path(__file__).parents[4] / "docs" / "inference.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```\n(start: <\|channel\|>.*?)```", text, re.DOTALL)
    compiler, tokenizer, end = make_compiler(tmp_path, "harmony")
    matcher = compiler.compile(serialized_grammar(Constraint(ConstraintKind.GRAMMAR, shown)))
    answer = (
        "<|channel|>analysis<|message|>Hm. {No} JSON <here>.\nYet.<|end|><|start|>assistant"
        '<|channel|>final<|message|>{"city": "Bern"}'
    )
    size = tokenizer.vocab_size + 21
    for token_id in tokenizer.encode(answer, add_special_tokens=False):
        assert token_id in allowed(matcher, size)
        matcher.advance([token_id])
    assert allowed(matcher, size) == {end}


def test_batches(tmp_path: Path) -> None:
    """Many masks at once are those of one at a time; matchers of one grammar go their own ways."""
    compiler, tokenizer, end = make_compiler(tmp_path, "merges", num_padding=0)
    size = tokenizer.vocab_size
    grammars = [serialized_grammar(Constraint(ConstraintKind.REGEX, text)) for text in EXPRESSIONS]
    starts = [allowed(compiler.compile(grammar), size) for grammar in grammars]
    masks = np.zeros((2 * len(grammars), -(-size // 32)), np.int32)
    matchers = [compiler.compile(grammar) for grammar in grammars for _ in range(2)]
    for index, matcher in enumerate(matchers[1::2]):
        matcher.advance([min(starts[index] - {end})])
    matchers[0].fill_masks(matchers, masks)
    for row, matcher in enumerate(matchers):
        bits = np.flatnonzero(np.unpackbits(masks[row].view(np.uint8), bitorder="little"))
        assert set(bits.tolist()) == allowed(matcher, size)
    assert [allowed(matcher, size) for matcher in matchers[::2]] == starts


def test_an_answers_limits_are_its_own(tmp_path: Path) -> None:
    """What others of the same grammar used up, at the same time and before, ends no answer earlier."""
    compiler, tokenizer, end = make_compiler(tmp_path, "merges", num_padding=0)
    grammar = serialized_grammar(Constraint(ConstraintKind.REGEX, "[a-z ]*e[a-z ]{200}"))

    def follow(matcher: Matcher, seed: int, num_tokens: int) -> tuple[list[int], str]:
        draw, tokens = random.Random(seed), list[int]()
        for _ in range(num_tokens):
            mask = allowed(matcher, tokenizer.vocab_size) - {end}
            if not mask:
                break
            tokens.append(draw.choice(sorted(mask)))
            matcher.advance(tokens[-1:])
        return tokens, matcher.error()

    alone = follow(compiler.compile(grammar), 1, 400)
    assert alone[1] == ""
    waiting = compiler.compile(grammar)
    ends = [follow(compiler.compile(grammar), seed, 3000) for seed in range(2, 4)]
    assert all("too many states" in error and len(tokens) > 1000 for tokens, error in ends)
    assert follow(waiting, 1, 400) == follow(compiler.compile(grammar), 1, 400) == alone


def test_errors_allow_nothing(tmp_path: Path) -> None:
    """A token outside the grammar, a limit: an error that stays, and no token, not even the end."""
    compiler, tokenizer, _ = make_compiler(tmp_path, "bytes")
    matcher = compiler.compile(serialized_grammar(Constraint(ConstraintKind.REGEX, "ab")))
    matcher.advance(b"x")
    assert matcher.error()
    assert allowed(matcher, tokenizer.vocab_size + 21) == set()
    deep = Constraint(ConstraintKind.GRAMMAR, 'start: "a"{1000000000}')
    matcher = compiler.compile(serialized_grammar(deep))
    for _ in range(5):
        matcher.advance(b"a")
        mask = allowed(matcher, tokenizer.vocab_size + 21)
    assert bool(mask) != bool(matcher.error())


def test_ambiguous_grammars_have_an_end(tmp_path: Path) -> None:
    """The parser's work for a token grows with the answer: by 2000 tokens it was stopped, and early."""
    compiler, tokenizer, _ = make_compiler(tmp_path, "bytes")
    ambiguous = Constraint(ConstraintKind.GRAMMAR, 'start: start start start | "a" | ')
    matcher = compiler.compile(serialized_grammar(ambiguous))
    for _ in range(20):
        matcher.advance(b"a" * 100)
    assert "less ambiguous" in matcher.error()
    assert allowed(matcher, tokenizer.vocab_size + 21) == set()
    # A long answer of a plain one is far from the limit.
    plain = compiler.compile(serialized_grammar(Constraint(ConstraintKind.JSON_OBJECT)))
    plain.advance(b'{"a": [' + b'"text", ' * 2000)
    assert plain.error() == ""


@pytest.mark.parametrize(
    ("text", "may_end"),
    [
        ('start: "a" <[2]> "b"', False),
        ('start: "a" <[*]> "b"', False),
        ('start: "a" (<[2]> "b" | "c")', False),
        ('start: "a" <[2]>', True),
        ('start: "a" <[*]> "b"?', True),
        ('start: "a" (<[2]> "b")?', True),
        ('start: "a"', True),
    ],
)
def test_ends_that_a_grammar_names(text: str, may_end: bool, tmp_path: Path) -> None:
    """End-of-sequence tokens come where a sentence is complete, alone and among others."""
    compiler, tokenizer, end = make_compiler(tmp_path, "merges")
    grammar = serialized_grammar(Constraint(ConstraintKind.GRAMMAR, text))
    matchers = [compiler.compile(grammar) for _ in range(2)]
    for matcher in matchers:
        matcher.advance(tokenizer.encode("a", add_special_tokens=False))
    size = tokenizer.vocab_size + 21
    masks = np.zeros((2, -(-size // 32)), np.int32)
    matchers[0].fill_masks(matchers, masks)
    assert (end in allowed(matchers[0], size)) == may_end
    assert [bool(word >> end & 1) for word in masks[:, 0].tolist()] == [may_end] * 2
    assert not matchers[0].error()


def test_after_the_end(tmp_path: Path) -> None:
    """Tokens after an end-of-sequence token change nothing and are no error."""
    compiler, _, end = make_compiler(tmp_path, "bytes")
    matcher = compiler.compile(serialized_grammar(Constraint(ConstraintKind.REGEX, "a+")))
    matcher.advance([*b"aa", end, *b"zz", end])
    assert matcher.error() == ""


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (ConstraintKind.JSON_SCHEMA, "{", "line 1"),
        (ConstraintKind.JSON_SCHEMA, '{"$ref": "https://example.com/s.json"}', "example.com"),
        (ConstraintKind.JSON_SCHEMA, '{"$ref": "#"}', "no answer satisfies"),
        (ConstraintKind.JSON_SCHEMA, '{"not": {}}', "not"),
        (ConstraintKind.JSON_SCHEMA, '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
        (ConstraintKind.JSON_SCHEMA, "false", "schema is false"),
        (ConstraintKind.JSON_SCHEMA, '{"type": "array", "items": ' * 200 + "{}" + "}" * 200, "120 levels"),
        (ConstraintKind.JSON_SCHEMA, json.dumps({"enum": [f"v{i}" for i in range(50_000)]}), "too big"),
        (ConstraintKind.REGEX, "(", "regex"),
        (ConstraintKind.REGEX, r"(a)\1", "backreferences"),
        (ConstraintKind.GRAMMAR, "start: nothing", "unknown name"),
        (ConstraintKind.GRAMMAR, "no rules", "rule"),
        (ConstraintKind.GRAMMAR, "start: <|nobody|>", "nobody"),
        (ConstraintKind.GRAMMAR, "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
        (ConstraintKind.GRAMMAR, "start: A\nA: /a/ & /b/", "no answer satisfies"),
        (ConstraintKind.GRAMMAR, '{"grammars": [{"json_schema": {}}]}', r"1\(1\)"),
    ],
)
def test_refused_with_words(kind: ConstraintKind, text: str, words: str, tmp_path: Path) -> None:
    """Llguidance's own, on one short line."""
    compiler, _, _ = make_compiler(tmp_path, "merges")
    with pytest.raises(GrammarRefusedError, match=words) as caught:
        compiler.compile(serialized_grammar(Constraint(kind, text)))
    assert "\n" not in str(caught.value)
    assert 0 < len(str(caught.value)) <= 500


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (
            ConstraintKind.REGEX,
            "(?=a)b",
            (
                "regex parse error: look-around, including look-ahead and look-behind, is not supported, "
                'at "(?="'
            ),
        ),
        (ConstraintKind.REGEX, "é\n/(b" + "x" * 600, 'regex parse error: unclosed group, at "("'),
        (ConstraintKind.REGEX, "(?i", "regex parse error: expected flag but got end of regex, at the end"),
        (ConstraintKind.REGEX, r"a\bb", r"lookarounds not supported yet; WordUnicode in regex /a\bb/"),
        (
            ConstraintKind.GRAMMAR,
            'start: A\nA: B\nB: /x(/\nC: "x"',
            'at 3(4): invalid regex "x(" (in regex): regex parse error: unclosed group, at "("',
        ),
        (ConstraintKind.GRAMMAR, "start: A", 'at 1(8): unknown name: "A"'),
    ],
)
def test_refused_without_listings(kind: ConstraintKind, text: str, words: str, tmp_path: Path) -> None:
    """What is wrong and with which part, not the grammar that an expression is wrapped in."""
    compiler, _, _ = make_compiler(tmp_path, "merges")
    with pytest.raises(GrammarRefusedError) as caught:
        compiler.compile(serialized_grammar(Constraint(kind, text)))
    assert str(caught.value) == words


def test_answers_that_no_token_can_begin(tmp_path: Path) -> None:
    """A model whose head lacks the tokens."""
    compiler, _, _ = make_compiler(tmp_path, "bytes", vocab_size=97)
    with pytest.raises(GrammarRefusedError):
        compiler.compile(serialized_grammar(Constraint(ConstraintKind.REGEX, "b+")))


def test_models_without_structured_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No library, no end-of-sequence token, another decoder, other bytes: each is named."""
    compiler, tokenizer, end = make_compiler(tmp_path, "bytes")
    assert missing_library() == ""
    del compiler
    with pytest.raises(GrammarsUnavailableError, match="end-of-sequence"):
        GrammarCompiler(tmp_path / "bytes", 300, ())
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "token_bytes", lambda self, i: b"?" if i == 65 else bytes([i % 256]))
        with pytest.raises(GrammarsUnavailableError, match=r"token 65 .*b'A', this server as b'\?'"):
            GrammarCompiler(tmp_path / "bytes", 256, (end,))
    description: dict[str, Any] = json.loads(tokenizer.to_json())
    description["decoder"] = {
        "type": "Metaspace",
        "replacement": "_",
        "prepend_scheme": "never",
        "split": True,
    }
    (tmp_path / "bytes" / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(GrammarsUnavailableError, match=r"cannot read its tokenizer\.json: .*decoder"):
        GrammarCompiler(tmp_path / "bytes", 300, (end,))
    monkeypatch.setattr(grammar_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GrammarsUnavailableError, match="package llguidance"):
        GrammarCompiler(tmp_path / "bytes", 300, (end,))
