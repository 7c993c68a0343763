"""What structured output costs the host: compiling a constraint, and a mask for each token of each request.

    python benchmarks/token_masks.py MODEL_DIR      a directory with a tokenizer.json; its size is what counts

Processor time, so that a busy machine shows the same. Answers are random walks: each next token is any that
the mask allows, so masks are of states that a model seldom comes to, too.
"""

import json
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from inference_service.domain.structured_output import Constraint, ConstraintKind
from inference_service.text.grammar import GrammarCompiler, serialized_grammar
from inference_service.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ITEM = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["id", "tags"],
}
PROPERTY = {"anyOf": [{"type": "string", "maxLength": 40}, {"type": "array", "items": ITEM}]}
LARGE = {
    "type": "object",
    "properties": {f"property_{i}": PROPERTY for i in range(60)},
    "required": [f"property_{i}" for i in range(60)],
}
ARITHMETIC = """start: sum
sum: term (("+"|"-") term)*
term: atom (("*"|"/") atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[0-9]+(\\.[0-9]+)?/
"""
CASES = {
    "any JSON object": Constraint(ConstraintKind.JSON_OBJECT),
    "schema, 4 properties": Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(PERSON)),
    "schema, 60 properties with arrays": Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(LARGE)),
    "enum of 5000 texts": Constraint(
        ConstraintKind.JSON_SCHEMA,
        json.dumps({"enum": [f"some value number {i} of it" for i in range(5000)]}),
    ),
    "regex, words with bounds": Constraint(ConstraintKind.REGEX, r"[A-Z][a-z]{2,20}( [a-z]{1,12}){3,30}\."),
    "regex, any 400 characters": Constraint(ConstraintKind.REGEX, r"(?s:.){0,400}"),
    "grammar, arithmetic": Constraint(ConstraintKind.GRAMMAR, ARITHMETIC),
    "choice of 3": Constraint(ConstraintKind.CHOICE, choices=("yes", "no", "maybe")),
}


def walk(
    compiler: GrammarCompiler, grammar: str, vocab_size: int, draw: random.Random
) -> tuple[list[float], list[float]]:
    """Seconds of each mask and of each advance over random answers of at most 60 tokens."""
    mask = np.zeros((1, -(-vocab_size // 32)), np.int32)
    masks: list[float] = []
    advances: list[float] = []
    for _ in range(12):
        matcher = compiler.compile(grammar)
        for _ in range(60):
            begun = time.thread_time()
            matcher.fill_masks([matcher], mask)
            masks.append(time.thread_time() - begun)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little"))
            token_id = int(draw.choice(allowed))
            if token_id in matcher.end_token_ids:
                break
            begun = time.thread_time()
            matcher.advance([token_id])
            advances.append(time.thread_time() - begun)
    return masks, advances


def main() -> None:
    """Print the table."""
    model_dir = Path(sys.argv[1])
    vocab_size = Tokenizer.from_directory(model_dir).vocab_size
    begun = time.thread_time()
    compiler = GrammarCompiler(model_dir, vocab_size, (0,))
    print(f"vocabulary {vocab_size}; reading the tokenizer {time.thread_time() - begun:.1f} s")
    print("| constraint | compile, ms | mask, µs: median | mean | p99 | most | advance, µs |")
    print("|---|---|---|---|---|---|---|")
    for name, constraint in CASES.items():
        begun = time.thread_time()
        grammar = serialized_grammar(constraint)
        compiler.compile(grammar)
        compile_ms = 1e3 * (time.thread_time() - begun)
        masks, advances = walk(compiler, grammar, vocab_size, random.Random(0))
        p99 = sorted(masks)[int(0.99 * (len(masks) - 1))]
        figures = (
            statistics.median(masks),
            statistics.mean(masks),
            p99,
            max(masks),
            statistics.mean(advances),
        )
        print(f"| {name} | {compile_ms:.1f} |", " | ".join(f"{1e6 * figure:.0f}" for figure in figures), "|")


if __name__ == "__main__":
    main()
