"""Grammars by llguidance: constraints to grammars, grammars to matchers.

llguidance is imported on first use: a node without it serves everything else. Nothing here bounds the time of
a compilation that is far too large (multiples of a large number, for one): grammar_checker does, in a process
of its own; what it let through is compiled here again at the same cost.
"""

import importlib.util
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_service.domain.structured_output import (
    Constraint,
    ConstraintKind,
    GrammarRefusedError,
    GrammarsUnavailableError,
    TokenMatcher,
)
from inference_service.text.grammar_schema import read_schema
from inference_service.text.tokenizer import Tokenizer

# llguidance's defaults, but for these two. Fuel bounds an expression's size: with the default of a million
# one step of a hostile grammar took 1.2 s and 240 MiB, with this 0.2 s and 50; an enum of 10,000 texts
# passes.
_INITIAL_LEXER_FUEL = 200_000
# About 2 KiB each, per answer: matchers share none.
_MAX_LEXER_STATES = 50_000
# What following an answer may take, of processor time. llguidance bounds the work of a mask, not that of a
# token in an ambiguous grammar, which grows with the answer's square or cube: 14 ms at token 500. With these
# no token took more than 3 ms. Other grammars took 0.03 ms a token at most, with 200,000 in the vocabulary.
_ADVANCE_S, _ADVANCE_PER_TOKEN_S = 0.1, 0.0002
# llguidance recurses over rules that name each other, some KiB a level, and over expressions: what the check
# passes on a stack this small has plenty where answers are followed (8 MiB commonly, or what is set below).
CHECK_STACK_BYTES = 2 << 20
_MASK_STACK_BYTES = 8 * CHECK_STACK_BYTES
_MAX_ERROR_CHARACTERS = 500
# Expressions are compiled as a grammar of one rule: where in that, and its text, is nobody's concern.
_WHOLE_GRAMMAR_IS_A_REGEX = re.compile(r"\Aat 1\(8\): invalid regex .* \(in regex\): ")
_LISTING_OF_A_REGEX = re.compile(r"\n +1 \| start: /.*\n *\^\n\Z")
# The lines of the grammar around an error, and the mark below them; the error says the place in figures.
_LISTING = re.compile(r"^ +\d+ \| .*\n?(?: *\^(?:\n|\Z))?", re.MULTILINE)
_MARKED_PART = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)(\^+)\nerror: (.*)")
# llguidance marks its special tokens, of which it gives no bytes, with this first byte.
_NO_TEXT = b"\xff"


def missing_library() -> str:
    """Why this node cannot do structured output, or ""."""
    if importlib.util.find_spec("llguidance") is None:
        return "structured output needs the package llguidance, which is not installed on this node"
    return ""


def serialized_grammar(constraint: Constraint) -> str:
    """Write a constraint in llguidance's own form; checks no more than that a schema is strict JSON.

    Raises:
        GrammarRefusedError: it has no such form.
    """
    from llguidance import LLMatcher  # noqa: PLC0415 (see the module's docstring)

    # Each as an entry of llguidance's list of grammars: a bare text that begins like a list would be read as
    # one.
    try:
        match constraint.kind:
            case ConstraintKind.JSON_SCHEMA | ConstraintKind.JSON_OBJECT:
                is_object = constraint.kind is ConstraintKind.JSON_OBJECT
                schema = '{"type": "object"}' if is_object else constraint.text
                return LLMatcher.grammar_from_json_schema(
                    read_schema(schema),
                    overrides=None if constraint.allows_whitespace else {"whitespace_flexible": False},
                )
            case ConstraintKind.REGEX:
                return LLMatcher.grammar_from_regex(constraint.text)
            case ConstraintKind.GRAMMAR:
                return _of_lark(constraint.text)
            case ConstraintKind.CHOICE:
                return _of_lark("start: TEXT\nTEXT: " + " | ".join(map(_quoted, constraint.choices)))
    except ValueError as error:
        raise GrammarRefusedError(shown(str(error))) from error


class GrammarCompiler:
    """Compiles for one model. Any thread."""

    def __init__(self, model_dir: Path, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """Read the tokenizer as llguidance sees it; a second for 200,000 tokens.

        Raises:
            GrammarsUnavailableError: there is no llguidance here, or no way from its tokens to the model's.
        """
        if reason := missing_library():
            raise GrammarsUnavailableError(reason)
        if not end_token_ids:
            raise GrammarsUnavailableError(
                "structured output needs an end-of-sequence token, and the model's configuration names none"
            )
        from llguidance import LLExecutor, LLParserLimits, LLTokenizer  # noqa: PLC0415

        tokenizer = Tokenizer.from_directory(model_dir)
        try:
            self._tokenizer = LLTokenizer(
                tokenizer.to_json(),
                n_vocab=max(vocab_size, tokenizer.vocab_size),
                eos_token=list(end_token_ids),
            )
        except ValueError as error:
            raise GrammarsUnavailableError(
                f"structured output is not there for this model: llguidance cannot read its tokenizer.json: "
                f"{shown(str(error))}"
            ) from error
        _check_bytes(tokenizer, self._tokenizer)
        self._limits = LLParserLimits(
            initial_lexer_fuel=_INITIAL_LEXER_FUEL, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
        )
        # Read by the threads of the executor, which would have 2 MiB.
        os.environ.setdefault("RUST_MIN_STACK", str(_MASK_STACK_BYTES))
        self._executor = LLExecutor()
        self._known = _known_tokens(tokenizer, vocab_size, self._tokenizer.vocab_size)
        self._num_words = -(-vocab_size // 32)
        self._end_token_ids = tuple(end_token_ids)

    def compile(self, grammar: str) -> "Matcher":
        """A matcher at the grammar's beginning, where at least one token may come.

        Raises:
            GrammarRefusedError: the grammar is invalid, too large, or no answer satisfies it.
        """
        from llguidance import LLMatcher  # noqa: PLC0415

        # Its deep_copy would not do for answers that are to be alike: copies share the lexer, with the count
        # of its states and what it has worked out before.
        inner = LLMatcher(self._tokenizer, grammar, limits=self._limits, log_level=0)
        matcher = Matcher(inner, self._executor, self._known, self._num_words, self._end_token_ids)
        if error := matcher.error():
            raise GrammarRefusedError(error)
        first = np.zeros((1, self._num_words), np.int32)
        matcher.fill_masks((matcher,), first)
        if error := matcher.error():
            raise GrammarRefusedError("no answer satisfies it" if error.startswith("NoExtension") else error)
        if not first.any():
            raise GrammarRefusedError("no token of the model's vocabulary can begin such an answer")
        return matcher


class Matcher:
    """Implements domain.structured_output.TokenMatcher."""

    def __init__(
        self,
        inner: Any,
        executor: Any,
        known: NDArray[np.int32],
        num_words: int,
        end_token_ids: tuple[int, ...],
    ) -> None:
        self.inner = inner
        self._executor = executor
        self._known = known
        self._num_words = num_words
        self._end_token_ids = end_token_ids
        self._is_over = False
        self._num_tokens = 0
        self._spent_s = 0.0

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """See TokenMatcher."""
        return self._end_token_ids

    @property
    def num_tokens(self) -> int:
        """See TokenMatcher."""
        return self._num_tokens

    def advance(self, token_ids: Sequence[int]) -> None:
        """See TokenMatcher."""
        for token_id in token_ids:
            if self._is_over or self.has_failed:
                return
            # An end-of-sequence token ends the request, wherever the grammar may have it.
            self._is_over = token_id in self._end_token_ids
            begun_s = time.thread_time()
            self.inner.consume_token(token_id)
            self._spent_s += time.thread_time() - begun_s
            self._num_tokens += 1

    def fill_masks(self, matchers: Sequence[TokenMatcher], out: NDArray[np.int32]) -> None:
        """See TokenMatcher."""
        rows = [matcher for matcher in matchers if isinstance(matcher, Matcher)]
        assert len(rows) == len(matchers)
        assert out.shape == (len(rows), self._num_words)
        num_words = len(self._known)
        # llguidance writes whole rows of its own width, which is larger where the tokenizer is.
        filled = out if num_words == self._num_words else np.empty((len(rows), num_words), np.int32)
        if len(rows) == 1:
            rows[0].inner.unsafe_compute_mask_ptr(filled.ctypes.data, 4 * num_words)
        else:
            pairs = [(matcher.inner, row) for row, matcher in enumerate(rows)]
            self._executor.unsafe_compute_mask_ptr(pairs, filled.ctypes.data, 4 * num_words, len(rows))
        np.bitwise_and(filled[:, : self._num_words], self._known[: self._num_words], out=out)
        for row, matcher in enumerate(rows):
            if matcher.has_failed:  # where llguidance would allow the end
                out[row] = 0
            else:
                matcher.clear_false_ends(out[row])

    def clear_false_ends(self, mask: NDArray[np.int32]) -> None:
        """Take out end-of-sequence tokens that a grammar names where its sentence would not be complete.

        They end the request there, too. `mask` is a row of `fill_masks`.
        """
        bits = mask.view(np.uint32)
        ends = [i for i in self._end_token_ids if i >> 5 < len(bits) and int(bits[i >> 5]) >> (i & 31) & 1]
        if not ends or self.inner.is_accepting():
            return
        for token_id in ends:
            after = self.inner.deep_copy()
            if not (after.consume_token(token_id) and after.is_accepting()):
                bits[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)

    def error(self) -> str:
        """See TokenMatcher."""
        if self._has_spent_all():
            return (
                f"its parser took {self._spent_s:.1f} s for {self._num_tokens} tokens; make it less ambiguous"
            )
        return shown(self.inner.get_error())

    @property
    def has_failed(self) -> bool:
        """Whether there is an error."""
        return self._has_spent_all() or self.inner.is_error()

    def _has_spent_all(self) -> bool:
        return self._spent_s > _ADVANCE_S + _ADVANCE_PER_TOKEN_S * self._num_tokens


def shown(message: str) -> str:
    """Bring llguidance's words on one line, as many as a client reads, without listings of the grammar."""
    if _LISTING_OF_A_REGEX.search(message):
        message = _WHOLE_GRAMMAR_IS_A_REGEX.sub("", message, count=1)
    message = _MARKED_PART.sub(_marked_part, _LISTING.sub("", message))
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= _MAX_ERROR_CHARACTERS else line[: _MAX_ERROR_CHARACTERS - 3] + "..."


def _marked_part(match: re.Match[str]) -> str:
    """The words of an error, then what the marks below the expression point at."""
    expression, indent, marks, words = match.groups()
    part = expression[len(indent) :][: len(marks)]
    return f"regex parse error: {words}" + (f', at "{part}"' if part else ", at the end")


def _of_lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _check_bytes(tokenizer: Tokenizer, other: Any) -> None:
    """Every token must be the same text to both, or a valid answer would be another text to the client."""
    for token_id in range(tokenizer.vocab_size):
        own = tokenizer.token_bytes(token_id)
        if own.startswith(_NO_TEXT) or not own:
            continue
        its = other.decode_bytes([token_id])
        if its != own:
            raise GrammarsUnavailableError(
                "structured output is not there for this model: llguidance reads token "
                f"{token_id} of its tokenizer.json as {its!r}, this server as {own!r}"
            )


def _known_tokens(tokenizer: Tokenizer, vocab_size: int, num_tokens: int) -> NDArray[np.int32]:
    """A bit for each token that the tokenizer has and the model can choose: not for padding rows."""
    known = np.zeros(-(-num_tokens // 32) * 32, np.uint8)
    for token_id in range(min(tokenizer.vocab_size, vocab_size)):
        known[token_id] = bool(tokenizer.token_bytes(token_id))
    return np.packbits(known, bitorder="little").view(np.int32)
