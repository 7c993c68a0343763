"""One adapter of every family in all the ways that it could come in: each answers as PEFT's own, in float32.

The reference is what transformers + peft computed for the file that peft wrote; a rewrite changes how the
same function is written. Sources, by what they got wrong:
unslothai/unsloth-zoo#1269 (packing of lora_B);
vllm-project/vllm#52198, NVIDIA-NeMo/Automodel#3626, unslothai/unsloth-zoo#629 (side of lora_A by version);
vllm-project/vllm#55545, sgl-project/sglang#40835, NVIDIA/TensorRT-LLM#1668 (rank-stabilised scale);
vllm-project/vllm#32019, #49327, #55158, predibase/lorax#70, #256 (ranks that are no power of two);
vllm-project/vllm#9275, verl-project/verl#7288, sgl-project/sglang#11034 (forms of target_modules).
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.golden import FIXTURES, GOLDEN_MODELS, GoldenModel, compare, golden_answers
from tests.support.golden_table import GoldenTable
from tests.support.lora_schemas import schema_of
from tests.support.rewritten_adapters import WAYS, Rewrite, take_apart
from tests.support.stack import Stack

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
SOURCES = ("attn-experts-r16", "attn-mlp-r16")  # experts, or a dense MLP
OF_EXPERTS = ("layouts", "orientations")


@pytest.fixture(scope="module", params=GOLDEN_MODELS, ids=lambda model: model.name)
def model(request: pytest.FixtureRequest) -> GoldenModel:
    """Each model in turn."""
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(model: GoldenModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A stack without adapters."""
    flags = ["--max-top-logprobs", str(model.vocab_size), "--max-active-adapters", "16"]
    root = tmp_path_factory.mktemp("rewritten")
    async with Stack(FIXTURES / "models" / model.name, root, node_flags=flags) as running:
        yield running


@pytest.mark.parametrize("way", WAYS)
async def test_each_rewrite_equals_what_peft_computes(
    stack: Stack, model: GoldenModel, way: str, table: GoldenTable, tmp_path: Path
) -> None:
    """All rewrites of one kind in mixed batches: log-probabilities and greedy tokens."""
    source = next(a for a in model.adapters() if a["name"] in SOURCES)
    adapter = take_apart(
        FIXTURES / source["dir"], schema_of(model.name), is_exchanged=model.golden == "llama4"
    )
    if way in OF_EXPERTS and not adapter.experts:
        pytest.skip("a dense model has no experts' layouts")
    rewrites = WAYS[way](adapter)
    assert len(rewrites) >= 5
    for name, rewrite in rewrites.items():
        await push(stack, tmp_path / name, rewrite)
    answers = await asyncio.gather(
        *(golden_answers(stack, model, f"demo/{name.lower()}", only=("p7", "p33")) for name in rewrites)
    )
    failures: list[str] = []
    for name, answer in zip(rewrites, answers, strict=True):
        verdicts = compare(source["golden"], answer)
        assert len(verdicts) >= 5, name
        table.add(model.name, f"rewritten: {way}", verdicts)
        failures += [f"{name}: {text}" for ok, text in verdicts if ok is False]
    assert not failures, "\n".join(failures)
    assert await stack.at_rest() == ""


async def push(stack: Stack, directory: Path, rewrite: Rewrite) -> None:
    """Upload it under its directory's name; every tensor must be used."""
    name = f"demo/{directory.name.lower()}"
    reply = await stack.upload(rewrite.write(directory), name)
    assert reply.revision.report.tensors_used == len(rewrite.tensors)
    await stack.wait_known(name, reply.revision.digest)
