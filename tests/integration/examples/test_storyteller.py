"""The demo's model through the real stack, on prompts held out from training, judged by rule."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from examples.storyteller.rules import RULES, names
from lorikeet.inference.v1 import generation_pb2
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")
STORYTELLER = Path(__file__).resolve().parents[3] / "examples" / "storyteller"
ASKED = json.loads((STORYTELLER / "heldout.json").read_text())[:8]
VOICES = ("base", *RULES)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """The storyteller with its three adapters."""
    async with Stack(STORYTELLER / "model", tmp_path_factory.mktemp("storyteller")) as running:
        for name in RULES:
            await running.upload(STORYTELLER / "adapters" / name, f"demo/{name}")
        for name in RULES:
            await running.wait_known(f"demo/{name}")
        yield running


async def tell(stack: Stack, voice: str, prompt: str) -> str:
    """One story, greedy, through the model's chat template."""
    chat = generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage(role="user", content=prompt)])
    request = generation_pb2.GenerateRequest(
        chat=chat, sampling=generation_pb2.SamplingParams(temperature=0.0, max_tokens=320)
    )
    if voice != "base":
        request.adapter = f"demo/{voice}"
    reply = await stack.inference().Complete(
        generation_pb2.CompleteRequest(request=request), metadata=stack.auth(), timeout=120
    )
    assert reply.finish.reason == generation_pb2.FINISH_REASON_STOP_TOKEN, reply.text
    return reply.text


async def test_each_voice_keeps_its_rule_and_breaks_the_others(stack: Stack) -> None:
    """All voices and prompts at once, in mixed batches: who answers is told by the text alone."""
    jobs = [(voice, asked) for asked in ASKED for voice in VOICES]
    texts = await asyncio.gather(*(tell(stack, voice, asked["prompt"]) for voice, asked in jobs))
    for (voice, asked), text in zip(jobs, texts, strict=True):
        kept = [rule for rule, holds in RULES.items() if holds(text)]
        assert kept == ([] if voice == "base" else [voice]), f"{voice} on {asked['prompt']!r}:\n{text}"
        assert names(text, asked["character"]), f"{voice} does not name the {asked['character']}:\n{text}"
