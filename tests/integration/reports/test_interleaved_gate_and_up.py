"""gpt-oss keeps gate and up in alternating rows; adapters for it are applied that way, in every layout.

Sources: thinking-machines-lab/tinker-cookbook#457, #459, vllm-project/vllm#31255: a delta meant for up landed
in gate's rows, for halves were taken where rows alternate.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from lorikeet_bench.rigs import write_byte_tokenizer
from tests.support import gpt_oss_reference
from tests.support.adapter_directories import PREFIX, config_of, write_adapter
from tests.support.expert_layouts import LAYOUTS, Tensors, Weights, exchanged, packed, pair
from tests.support.stack import Completion, Stack
from tests.support.tiny_gpt_oss import CONFIG, QUANTIZATION, make_weights, pack_experts, write_gpt_oss

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = [3, 17, 17, 0, 39, 8, 21, 2, 5, 30, 11, 12, 13, 14]
VOCAB = CONFIG["vocab_size"]
SCALE = 2.0
# Log-probabilities of a float32 node against float64.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Shape:
    """A tiny gpt-oss and its adapters' rank."""

    experts: int
    hidden: int
    inner: int
    rank: int
    top_k: int = 2
    is_packed: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """What the model's config says otherwise."""
        sizes = {
            "num_local_experts": self.experts,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_experts_per_tok": self.top_k,
        }
        return sizes | ({"quantization_config": QUANTIZATION} if self.is_packed else {})


SHAPES = [
    Shape(4, 32, 24, 3),
    pytest.param(Shape(3, 40, 7, 1, top_k=3), marks=pytest.mark.long),
    pytest.param(Shape(5, 32, 32, 4), marks=pytest.mark.long),
    Shape(4, 32, 64, 2, is_packed=True),
]


@dataclass(frozen=True)
class Factors:
    """One layer's adapter: A [E, r, in], B [E, out, r], B's rows in the model's order; None is no adapter."""

    gate_up: Weights | None
    down: Weights | None


def random_factors(shape: Shape, seed: int, parts: str) -> list[Factors]:
    """An adapter for each layer, of both parameters or one of them."""
    generator = torch.Generator().manual_seed(seed)

    def factors(in_features: int, out: int) -> Weights:
        size_a, size_b = (shape.experts, shape.rank, in_features), (shape.experts, out, shape.rank)
        a, b = torch.randn(size_a, generator=generator), torch.randn(size_b, generator=generator)
        return a / in_features**0.5, 0.5 * b

    return [
        Factors(
            factors(shape.hidden, 2 * shape.inner) if parts != "down" else None,
            factors(shape.inner, shape.hidden) if parts != "gate_up" else None,
        )
        for _ in range(CONFIG["num_hidden_layers"])
    ]


def gate_rows_first(b: torch.Tensor) -> torch.Tensor:
    """Rows g0, u0, g1, ... as g0, g1, ..., u0, ...: the order of files that list gate and up apart."""
    return torch.cat((b[:, 0::2], b[:, 1::2]), dim=1)


def tensors_of(layout: str, root: str, factors: Factors) -> Tensors:
    """One layer's tensors in a layout. Files with one parameter have PEFT's names for that case."""
    gate_up, down = factors.gate_up, factors.down
    if gate_up is None or down is None:
        weights = gate_up or down
        assert weights is not None
        if layout == "stacked-3d":
            return pair(f"{root}.{'down_proj' if gate_up is None else 'gate_up_proj'}", *weights)
        return pair(root, *(exchanged(*weights) if layout == "peft-fused-exchanged" else packed(*weights)))
    if layout in {"per-expert", "w123", "stacked-w123"}:
        gate_up = (gate_up[0], gate_rows_first(gate_up[1]))
    return LAYOUTS[layout](root, gate_up, down)


def targets(factors: Factors) -> list[str]:
    """adapter_config.json's target_parameters."""
    found = {"gate_up_proj": factors.gate_up, "down_proj": factors.down}
    return [f"mlp.experts.{name}" for name, weights in found.items() if weights is not None]


def write(path: Path, layout: str, layers: list[Factors], rank: int) -> Path:
    """An adapter directory."""
    tensors: Tensors = {}
    for index, factors in enumerate(layers):
        root = f"model.layers.{index}.mlp.experts"
        tensors |= {PREFIX + k: v for k, v in tensors_of(layout, root, factors).items()}
    config = config_of(rank, SCALE * rank, target_parameters=targets(layers[0]))
    return write_adapter(path, tensors, config)


def merged(
    weights: gpt_oss_reference.Weights, layers: list[Factors], order: str = "as stored"
) -> gpt_oss_reference.Weights:
    """The checkpoint with the adapter in it; `order` misreads B's rows as the reported servers did."""
    result = {name: value.astype(np.float64) for name, value in weights.items()}
    for index, factors in enumerate(layers):
        for name, given in (("gate_up_proj", factors.gate_up), ("down_proj", factors.down)):
            if given is None:
                continue
            a, b = (factor.double().numpy() for factor in given)
            if name == "gate_up_proj" and order != "as stored":
                half = b.shape[1] // 2
                b = {
                    "halves": np.stack((b[:, :half], b[:, half:]), axis=2).reshape(b.shape),
                    "swapped": b.reshape(len(b), half, 2, -1)[:, :, ::-1].reshape(b.shape),
                }[order]
            for expert in range(len(a)):
                matrix = result[f"model.layers.{index}.mlp.experts.{name}"][expert]
                matrix += SCALE * (b[expert] @ a[expert]).T
    return result


@dataclass
class Served:
    """A running stack and what its adapters' answers must be."""

    stack: Stack
    shape: Shape
    weights: gpt_oss_reference.Weights
    adapters: dict[str, list[Factors]] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """The model's."""
        return CONFIG | self.shape.fields


CASES = [
    *((layout, "both") for layout in LAYOUTS if layout != "peft-fused-expert-major"),
    *((layout, part) for layout in ("peft-fused", "stacked-3d") for part in ("gate_up", "down")),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SHAPES, ids=str)
async def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    """A stack over one shape with every layout uploaded, each with weights of its own."""
    shape: Shape = request.param
    root = tmp_path_factory.mktemp("interleaved")
    weights = make_weights(CONFIG | shape.fields)
    weights = pack_experts(weights) if shape.is_packed else weights
    model = write_gpt_oss(root / "model", weights, **shape.fields)
    write_byte_tokenizer(model, VOCAB)
    async with Stack(model, root / "stack", node_flags=["--max-top-logprobs", str(VOCAB)]) as stack:
        found = Served(stack, shape, gpt_oss_reference.unpacked(weights))
        for seed, (layout, parts) in enumerate(CASES):
            name = f"demo/{layout}-{parts.replace('_', '-')}"
            found.adapters[name] = random_factors(shape, seed, parts)
            await stack.upload(write(root / str(seed), layout, found.adapters[name], shape.rank), name)
        for name in found.adapters:
            await stack.wait_known(name)
        yield found


async def answer(served: Served, adapter: str | None) -> np.ndarray:
    """Log-probabilities [T, V] after each token of the prompt."""
    done: Completion = await served.stack.generate(
        TOKENS, adapter=adapter, max_tokens=1, logprobs=VOCAB, prompt_logprobs=VOCAB
    )
    rows = np.full((len(TOKENS), VOCAB), np.nan)
    for row, token in zip(rows, [*done.prompt_tokens[1:], *done.tokens], strict=True):
        for top in token.top_logprobs:
            row[top.id] = top.logprob
    return rows


async def test_every_layout_alone_and_together(served: Served) -> None:
    """Each adapter's log-probabilities equal float64 at every position, alone and in one batch with all."""
    names: list[str | None] = [None, *served.adapters]
    expected = {
        name: gpt_oss_reference.logprobs(
            served.config, merged(served.weights, served.adapters.get(name or "", [])), TOKENS
        )
        for name in names
    }
    for name in names:
        np.testing.assert_allclose(
            await answer(served, name), expected[name], atol=TOLERANCE, rtol=0, err_msg=str(name)
        )
    together = await asyncio.gather(*(answer(served, name) for name in names))
    for name, rows in zip(names, together, strict=True):
        np.testing.assert_allclose(rows, expected[name], atol=TOLERANCE, rtol=0, err_msg=str(name))


async def test_other_readings_of_the_rows_would_be_seen(served: Served) -> None:
    """Halves, swapped rows or no adapter at all move the answer far more than the tolerance above."""
    adapter = served.adapters["demo/peft-fused-both"]
    right = gpt_oss_reference.logprobs(served.config, merged(served.weights, adapter), TOKENS)
    wrong = [gpt_oss_reference.logprobs(served.config, merged(served.weights, []), TOKENS)]
    wrong += [
        gpt_oss_reference.logprobs(served.config, merged(served.weights, adapter, order), TOKENS)
        for order in ("halves", "swapped")
    ]
    assert min(np.abs(other - right).max() for other in wrong) > 100 * TOLERANCE
