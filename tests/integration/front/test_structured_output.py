"""Structured output through gRPC and the engine process; answers are judged by jsonschema, re and lark."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from inference_service.text.tokenizer import Tokenizer
from lorikeet.inference.v1 import generation_pb2 as pb
from tests.support.lone_node import lone_node
from tests.support.stack import Completion, Stack
from tests.support.structured_cases import constraints, satisfies

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = Path(__file__).parents[2] / "fixtures" / "models" / "mixtral"
TOKENIZER = Tokenizer.from_directory(MODEL)
EOS = 2
PROMPT = [5, 60, 200, 7]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One node without a manager."""
    root = tmp_path_factory.mktemp("structured")
    async with lone_node(MODEL, root, ["--max-running-requests", "8"]) as node:
        yield node.stack


async def ask(stack: Stack, output: pb.StructuredOutput | None, **sampling: Any) -> Completion:
    """One answer of a hot model, unless `sampling` says otherwise."""
    values = {"max_tokens": 200, "temperature": 1.5, "seed": 1, **sampling}
    return await stack.generate(PROMPT, structured_output=output, **values)


def check_ended(done: Completion) -> None:
    """By an end-of-sequence token that is not in the text."""
    assert done.finish is not None
    assert (done.finish.reason, done.finish.stop_token_id) == (pb.FINISH_REASON_STOP_TOKEN, EOS), done
    assert done.token_ids[-1] == EOS
    assert done.text == TOKENIZER.decode(done.token_ids[:-1], skip_special_tokens=True)


async def test_every_kind_beside_others(stack: Stack) -> None:
    """Mixed batches of all kinds; each answer is what was asked for."""
    outputs = constraints(random.Random(0), 40)
    answers = await asyncio.gather(*(ask(stack, output, seed=seed) for seed, output in enumerate(outputs)))
    for output, done in zip(outputs, answers, strict=True):
        check_ended(done)
        assert satisfies(done.text, output), (done.text, output)
