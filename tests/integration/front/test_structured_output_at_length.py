"""Structured output of many kinds over several models, with preemption; hostile grammars by the thousand.

Answers are judged by jsonschema, re and lark.
"""

import asyncio
import random
from pathlib import Path

import pytest

from inference_service.domain.structured_output import Constraint, ConstraintKind, GrammarRefusedError
from inference_service.text.grammar_checker import GrammarChecker
from lorikeet.inference.v1 import generation_pb2 as pb
from tests.support.hostile_grammars import hostile_constraints
from tests.support.lone_node import lone_node
from tests.support.stack import Stack
from tests.support.structured_cases import constraints, satisfies

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[3]
MODELS = ROOT / "tests" / "fixtures" / "models"
# Two tokenizers; one model has padding rows. With overlap a step is launched before its tokens are known.
SERVED: dict[str, tuple[Path, list[str]]] = {
    "gpt_oss": (MODELS / "gpt_oss", []),
    "qwen3_moe": (MODELS / "qwen3_moe", ["--overlap"]),
    "deepseek_v3": (MODELS / "deepseek_v3", ["--overlap", "--graph-batch-sizes", "2,8"]),
    "storyteller": (ROOT / "examples" / "storyteller" / "model", []),
}
NUM_ANSWERS = 140


@pytest.mark.parametrize("model", SERVED)
async def test_answers_of_hot_models(model: str, tmp_path: Path) -> None:
    """560 in all, in mixed batches: every one that ends is right, and nearly all do.

    There are few blocks: then long answers, some of which are preempted, are as alone.
    """
    model_dir, flags = SERVED[model]
    flags = [*flags, "--max-running-requests", "12", "--num-blocks", "32", "--block-tokens", "16"]
    async with lone_node(model_dir, tmp_path, flags) as node:
        stack = node.stack
        outputs = constraints(random.Random(model), NUM_ANSWERS)
        places = asyncio.Semaphore(24)

        async def answer(seed: int, output: pb.StructuredOutput) -> bool:
            async with places:
                done = await stack.generate(
                    [5, 60, 200, 7, seed],
                    structured_output=output,
                    temperature=1.3,
                    seed=seed,
                    max_tokens=160,
                    timeout_s=120,
                )
            assert done.finish is not None
            if done.finish.reason == pb.FINISH_REASON_LENGTH:
                return False
            assert done.finish.reason == pb.FINISH_REASON_STOP_TOKEN
            assert satisfies(done.text, output), (done.text, output)
            return True

        ends = await asyncio.gather(*(answer(seed, output) for seed, output in enumerate(outputs)))
        assert sum(ends) >= 0.95 * NUM_ANSWERS
        preemptions = await _preempted_like_alone(stack)
        status = await stack.status()
        assert status.kv_blocks_available == status.kv_blocks_total
        print(f"{model}: {sum(ends)} of {NUM_ANSWERS} ended; {preemptions} preemptions of long answers")


async def _preempted_like_alone(stack: Stack) -> int:
    """A seeded answer is the same, preempted or not; returns how often one was."""

    async def answer(seed: int) -> str:
        done = await stack.generate(
            [9] * 20,
            structured_output=pb.StructuredOutput(regex="([a-z0-9]{2} ){40}"),
            temperature=1.3,
            seed=seed,
            max_tokens=130,
            timeout_s=120,
        )
        assert done.finish is not None
        assert done.finish.reason == pb.FINISH_REASON_STOP_TOKEN
        return done.text

    alone = [await answer(seed) for seed in range(4)]
    before = (await stack.status()).preemptions
    crowd = await asyncio.gather(*(answer(seed % 4) for seed in range(20)))
    assert [alone[seed % 4] for seed in range(20)] == crowd
    preemptions = (await stack.status()).preemptions - before
    assert preemptions > 0
    return preemptions


async def test_hostile_grammars() -> None:
    """2000: each is compiled or refused, within bounds; good ones are served all the while."""
    checker = GrammarChecker(MODELS / "mixtral", 533, (2,))
    source = hostile_constraints(random.Random(7))
    counts = {"compiled": 0, "refused": 0, "ended": 0}
    try:
        for number in range(2000):
            try:
                assert await checker.check(next(source), "hostile")
                counts["compiled"] += 1
            except GrammarRefusedError as error:
                counts["ended" if "compiling it takes" in str(error) else "refused"] += 1
            if number % 100 == 0:
                assert await checker.check(Constraint(ConstraintKind.REGEX, f"good{number}"), "good")
    finally:
        await checker.close()
    print(counts)
    assert min(counts["compiled"], counts["refused"]) > 100
