"""Nodes that cannot do structured output, nodes whose engine dies, and what is left when a node ends."""

import asyncio
import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import grpc
import psutil
import pytest

from lorikeet.inference.v1 import generation_pb2 as pb
from tests.support.lone_node import lone_node
from tests.support.stack import Stack
from tests.support.structured_cases import constraints, satisfies
from tests.support.waiting import eventually

pytestmark = pytest.mark.long
MODEL = Path(__file__).parents[2] / "fixtures" / "models" / "mixtral"
ADAPTERS = MODEL.parents[1] / "adapters" / "mixtral"
YES = pb.StructuredOutput(choice=pb.Choices(values=["yes"]))


async def refused(stack: Stack) -> str:
    """The words of FAILED_PRECONDITION; other requests are served."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.generate([5, 6], structured_output=YES, max_tokens=20)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert (await stack.generate([5, 6], max_tokens=3, ignore_eos=True)).finish
    details = caught.value.details() or ""
    assert details.startswith("sampling.structured_output.choice")
    return details


def processes(stack: Stack, module: str) -> list[psutil.Process]:
    """Of the node's, by what they run."""
    assert stack.node.popen is not None
    children: Iterable[psutil.Process] = psutil.Process(stack.node.popen.pid).children()
    return [child for child in children if module in " ".join(child.cmdline())]


async def test_a_node_without_llguidance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts, and says what it lacks."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text('import sys\nsys.modules["llguidance"] = None\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    async with lone_node(MODEL, tmp_path / "root") as node:
        assert "package llguidance" in await refused(node.stack)


async def test_a_tokenizer_that_llguidance_cannot_take(tmp_path: Path) -> None:
    """A decoder that it does not know; the words are its own, and come again."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    description = json.loads((model / "tokenizer.json").read_text())
    description["decoder"] = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "never"}
    (model / "tokenizer.json").write_text(json.dumps(description))
    async with lone_node(model, tmp_path / "root") as node:
        first = await refused(node.stack)
        assert "tokenizer.json" in first
        assert await refused(node.stack) == first


async def test_engines_and_checkers_that_die(tmp_path: Path) -> None:
    """Each is started again, constraints known and new ones are served; no process is left at the end."""
    async with lone_node(MODEL, tmp_path) as node:
        stack = node.stack
        words: list[str | None] = []

        async def served(output: pb.StructuredOutput, text: str) -> bool:
            try:
                return (await stack.generate([5, 6], structured_output=output, max_tokens=20)).text == text
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                words.append(error.details())
                await asyncio.sleep(0.1)
                return False

        assert await served(YES, "yes"), words
        (engine,) = processes(stack, "engine_process")
        (checker,) = processes(stack, "grammar_process")
        engine.kill()
        checker.kill()
        while not await served(YES, "yes"):
            pass
        assert await served(pb.StructuredOutput(regex="no"), "no"), words
        left = [*processes(stack, "engine_process"), *processes(stack, "grammar_process")]
        assert len(left) == 2
        assert not {engine.pid, checker.pid} & {process.pid for process in left}
    await eventually(lambda: not any(process.is_running() for process in left), 30)


async def test_adapters_in_one_batch(tmp_path: Path) -> None:
    """Two adapters and the base model, some without structured output: each is as alone, and right."""
    async with lone_node(MODEL, tmp_path) as node:
        for name in ("attn-r8", "experts-r4"):
            shutil.copytree(ADAPTERS / name, tmp_path / name)
            node.names[name] = node.ingested(tmp_path / name)
            node.put(node.names[name])
        await node.sync()
        outputs = constraints(random.Random(11), 6)

        async def answer(number: int) -> tuple[list[int], str]:
            output = outputs[number // 3] if number < 18 else None
            done = await node.stack.generate(
                [5, 60, 200],
                adapter=(None, "attn-r8", "experts-r4")[number % 3],
                structured_output=output,
                temperature=1.3,
                seed=number % 3,
                max_tokens=80,
            )
            assert done.finish is not None
            if output is not None and done.finish.reason == pb.FINISH_REASON_STOP_TOKEN:
                assert satisfies(done.text, output)
            return done.token_ids, done.text

        alone = [await answer(number) for number in range(21)]
        assert await asyncio.gather(*(answer(number) for number in range(21))) == alone
        # The same constraint and seed, another model: other answers.
        assert len({text for _, text in alone}) > 10
