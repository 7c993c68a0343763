"""Any rank, any scale and any choice of modules and layers is served as its own numbers say.

Sources: vllm-project/vllm#32019, #49327, #55158, predibase/lorax#70, #256 (ranks that are no power of two);
vllm-project/vllm#55545, sgl-project/sglang#40835, NVIDIA/TensorRT-LLM#1668 (rsLoRA's scale on experts);
vllm-project/vllm#9275, verl-project/verl#7288, sgl-project/sglang#11034 (target_modules as people have it).
"""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch

from lorikeet_bench.rigs import write_byte_tokenizer
from tests.support import gpt_oss_reference
from tests.support.adapter_directories import PREFIX, config_of, write_adapter
from tests.support.expert_layouts import Tensors, packed, pair
from tests.support.stack import Stack
from tests.support.tiny_gpt_oss import CONFIG, make_weights, write_gpt_oss

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = [3, 17, 17, 0, 39, 8, 21, 2, 5, 30, 11, 12]
# Hidden size and expert width are no multiples of 32.
FIELDS = {"hidden_size": 96, "intermediate_size": 40, "num_local_experts": 3, "num_experts_per_tok": 2}
MODEL = CONFIG | FIELDS
VOCAB, NUM_EXPERTS, MAX_RANK = MODEL["vocab_size"], 3, 128
RANKS = (1, 2, 4, 7, 8, 12, 16, 24, 33, 48, 64, 100, MAX_RANK)
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Log-probabilities of a float32 node against float64.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Case:
    """An adapter: its tensors without PEFT's prefix, its configuration, and the scale of each module."""

    tensors: Tensors
    config: dict[str, Any]
    scales: dict[str, float] = field(default_factory=dict)
    scale: float = 1.0

    def merged(self, base: gpt_oss_reference.Weights) -> gpt_oss_reference.Weights:
        """The base with the adapter added, in float64."""
        weights = {k: v.astype(np.float64) for k, v in base.items()}
        t = {k: v.double().numpy() for k, v in self.tensors.items()}
        for name in [n for n in t if n.endswith("lora_A.weight")]:
            module = name.removesuffix(".lora_A.weight")
            a, b = t[name], t[f"{module}.lora_B.weight"]
            scale = self.scales.get(module, self.scale)
            if ".experts" not in module:
                weights[f"{module}.weight"] += scale * b @ a
                continue
            parameter = "down_proj" if module.endswith("experts") else "gate_up_proj"
            target = weights[f"{module.removesuffix('.base_layer')}.{parameter}"]
            rank = len(a) // NUM_EXPERTS
            for expert in range(NUM_EXPERTS):
                own_b = np.stack([b[:, j * NUM_EXPERTS + expert] for j in range(rank)], axis=1)
                target[expert] += scale * (own_b @ a[expert * rank : (expert + 1) * rank]).T
        return weights


def linear(layer: int, name: str, rank: int, generator: torch.Generator) -> Tensors:
    """A pair for one projection of the attention."""
    rows = {"q_proj": 64, "k_proj": 32, "v_proj": 32}[name]
    a, b = torch.randn(rank, 96, generator=generator), torch.randn(rows, rank, generator=generator)
    return pair(f"model.layers.{layer}.self_attn.{name}", a / 96**0.5, 0.3 * b / rank**0.5)


def experts(layer: int, rank: int, generator: torch.Generator) -> Tensors:
    """Both parameters of a layer's experts, as PEFT packs them."""
    root = f"model.layers.{layer}.mlp.experts"
    tensors: Tensors = {}
    for module, columns, rows in ((f"{root}.base_layer", 96, 80), (root, 40, 96)):
        a = torch.randn(NUM_EXPERTS, rank, columns, generator=generator) / columns**0.5
        b = 0.3 * torch.randn(NUM_EXPERTS, rows, rank, generator=generator) / rank**0.5
        tensors |= pair(module, *packed(a, b))
    return tensors


def of_rank(rank: int) -> Case:
    """One rank on attention and experts of both layers."""
    generator = torch.Generator().manual_seed(rank)
    tensors: Tensors = {}
    for layer in range(2):
        tensors |= linear(layer, "q_proj", rank, generator) | experts(layer, rank, generator)
    return Case(tensors, config_of(rank, 2 * rank, target_parameters=PARAMETERS), scale=2.0)


def with_rslora() -> Case:
    """R = 16, alpha = 16: 4.0 everywhere but on gate_up, where patterns say 3 and 6: 6 / sqrt(3)."""
    generator = torch.Generator().manual_seed(77)
    tensors: Tensors = {}
    scales: dict[str, float] = {}
    for layer in range(2):
        inner = f"model.layers.{layer}.mlp.experts.base_layer"
        narrow = {k: v for k, v in experts(layer, 3, generator).items() if k.startswith(inner)}
        tensors |= linear(layer, "q_proj", 16, generator) | experts(layer, 16, generator) | narrow
        scales[inner] = 6 / math.sqrt(3)
    patterns = {"rank_pattern": {"experts.gate_up_proj": 3}, "alpha_pattern": {"experts.gate_up_proj": 6}}
    config = config_of(16, 16, use_rslora=True, target_parameters=PARAMETERS, **patterns)
    return Case(tensors, config, scales, scale=4.0)


def covering(seed: int, layers: tuple[int, ...], names: tuple[str, ...], **config: Any) -> Case:
    """Rank 3 on some projections of some layers, whatever `config` says of it."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for layer in layers:
        for name in names:
            tensors |= linear(layer, name, 3, generator)
    return Case(tensors, config_of(3, 6, **config), scale=2.0)


ATTENTION = ("q_proj", "k_proj", "v_proj")
DOTTED = [f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in ATTENTION]
COVERAGE = {
    "all-linear": covering(1, (0, 1), ATTENTION, target_modules="all-linear"),
    "regex": covering(2, (0, 1), ("q_proj",), target_modules=r".*\.self_attn\.q_proj"),
    "listed-but-one-layer": covering(3, (1,), ("q_proj", "v_proj"), target_modules=["q_proj", "v_proj"]),
    "dotted": covering(4, (0, 1), ATTENTION, target_modules=DOTTED),
    "to-transform": covering(5, (1,), ("k_proj",), target_modules=["k_proj"], layers_to_transform=[1]),
    "attention-only": covering(6, (0, 1), ("v_proj",), target_modules=["v_proj"]),
}
CASES = {f"rank-{rank}": of_rank(rank) for rank in RANKS} | {"rslora": with_rslora()} | COVERAGE


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A node of the tiny model that takes ranks up to 128, every adapter uploaded."""
    async with stack_with(tmp_path_factory.mktemp("ranks"), MAX_RANK, CASES) as running:
        yield running


@asynccontextmanager
async def stack_with(root: Path, max_rank: int, cases: Mapping[str, Case]) -> AsyncIterator[Stack]:
    """A node of the tiny model with these adapters."""
    model = write_gpt_oss(root / "model", make_weights(MODEL), **FIELDS)
    write_byte_tokenizer(model, VOCAB)
    flags = ["--max-top-logprobs", str(VOCAB), "--max-rank", str(max_rank), "--max-active-adapters", "24"]
    async with Stack(model, root / "stack", node_flags=flags) as running:
        for name, case in cases.items():
            await push(running, root / name, case)
        for name in cases:
            await running.wait_known(f"demo/{name}")
        yield running


async def push(stack: Stack, path: Path, case: Case) -> None:
    """Upload it under its directory's name."""
    tensors = {PREFIX + name: value for name, value in case.tensors.items()}
    await stack.upload(write_adapter(path, tensors, case.config), f"demo/{path.name}")


async def answer(stack: Stack, name: str | None) -> np.ndarray:
    """The node's log-probabilities at every position."""
    done = await stack.generate(
        TOKENS, adapter=name and f"demo/{name}", max_tokens=1, logprobs=VOCAB, prompt_logprobs=VOCAB
    )
    rows = np.full((len(TOKENS), VOCAB), np.nan)
    for row, token in zip(rows, [*done.prompt_tokens[1:], *done.tokens], strict=True):
        for top in token.top_logprobs:
            row[top.id] = top.logprob
    return rows


async def check(stack: Stack, names: list[str]) -> None:
    """All at once, then each alone, against float64; and each adapter does something."""
    base = make_weights(MODEL)
    plain = gpt_oss_reference.logprobs(MODEL, base, TOKENS)
    together = await asyncio.gather(*(answer(stack, name) for name in (None, *names)))
    np.testing.assert_allclose(together[0], plain, atol=TOLERANCE)
    for name, mixed in zip(names, together[1:], strict=True):
        expected = gpt_oss_reference.logprobs(MODEL, CASES[name].merged(base), TOKENS)
        assert np.abs(expected - plain).max() > 100 * TOLERANCE, name
        np.testing.assert_allclose(mixed, expected, atol=TOLERANCE, err_msg=f"{name}, with others")
        np.testing.assert_allclose(await answer(stack, name), expected, atol=TOLERANCE, err_msg=name)


async def test_every_rank_in_one_batch(stack: Stack) -> None:
    """From 1 to the maximum, on attention and experts, all in the same steps."""
    await check(stack, [f"rank-{rank}" for rank in RANKS])


async def test_rank_beyond_the_maximum_is_refused(stack: Stack, tmp_path: Path) -> None:
    """With the limit named; nothing of it is left."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await push(stack, tmp_path / "too-wide", of_rank(MAX_RANK + 1))
        await stack.wait_known("demo/too-wide")
        await answer(stack, "too-wide")
    assert str(MAX_RANK) in str(caught.value.details())
    await check(stack, ["rank-7"])


@pytest.mark.long
@pytest.mark.parametrize("maximum", [1, 8, 64, 256])
async def test_every_maximum_serves_what_it_allows(tmp_path: Path, maximum: int) -> None:
    """The same small adapters under any maximum, and one of the maximum itself; one rank more is refused."""
    cases = {f"rank-{rank}": of_rank(rank) for rank in sorted({1, min(7, maximum), maximum})}
    base = make_weights(MODEL)
    async with stack_with(tmp_path, maximum, cases) as running:
        for name, case in cases.items():
            expected = gpt_oss_reference.logprobs(MODEL, case.merged(base), TOKENS)
            np.testing.assert_allclose(await answer(running, name), expected, atol=TOLERANCE, err_msg=name)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await push(running, tmp_path / "too-wide", of_rank(maximum + 1))
        assert f"up to {maximum}" in str(caught.value.details())


async def test_rslora_scales_experts_too(stack: Stack) -> None:
    """By the root of each module's own rank."""
    await check(stack, ["rslora"])


async def test_coverage_is_what_the_tensors_cover(stack: Stack) -> None:
    """A string, a regex, a list longer than the tensors, dotted names, layers left out, attention alone."""
    await check(stack, list(COVERAGE))
