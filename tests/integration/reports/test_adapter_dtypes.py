"""Adapters come in whatever dtype their trainer saved, rarely the base's: all floats are served alike.

Sources: triton-inference-server/tensorrtllm_backend#791, NVIDIA/TensorRT-LLM#2434, vllm-project/vllm#27468,
turboderp/exllama#170: assertions at the first request, the base's output without a warning, bytes
reinterpreted.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from lorikeet_bench.rigs import write_byte_tokenizer
from tests.support import gpt_oss_reference
from tests.support.adapter_directories import PREFIX, config_of, write_adapter
from tests.support.expert_layouts import Tensors, packed, pair
from tests.support.stack import Stack
from tests.support.tiny_gpt_oss import CONFIG, make_weights, write_gpt_oss

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = [3, 17, 17, 0, 39, 8, 21, 2, 5, 30, 11, 12]
# Every token goes to every expert: rounding then never sends one elsewhere, where answers differ by far.
FIELDS = {
    "num_local_experts": 3,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
}
MODEL = CONFIG | FIELDS
VOCAB, RANK, SCALE = MODEL["vocab_size"], 2, 2.0
LAYER = "model.layers.0"
Q, V, ROUTER, EXPERTS = (
    f"{LAYER}.{n}" for n in ("self_attn.q_proj", "self_attn.v_proj", "mlp.router", "mlp.experts")
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BIG = f"{PREFIX}{V}.lora_B.weight"


def adapter(seed: int) -> Tensors:
    """Random weights on attention, router and experts, with PEFT's names and packing."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    hidden, inner, num_experts = MODEL["hidden_size"], MODEL["intermediate_size"], MODEL["num_local_experts"]
    tensors: Tensors = {}
    for module, out in ((Q, 64), (V, 32), (ROUTER, num_experts)):
        tensors |= pair(module, normal(RANK, hidden) / hidden**0.5, 0.3 * normal(out, RANK))
    for module, in_features, out in ((f"{EXPERTS}.base_layer", hidden, 2 * inner), (EXPERTS, inner, hidden)):
        a, b = normal(num_experts, RANK, in_features) / in_features**0.5, 0.2 * normal(num_experts, out, RANK)
        tensors |= pair(module, *packed(a, b))
    return {PREFIX + name: value for name, value in tensors.items()}


def saved(tensors: Tensors, *dtypes: torch.dtype) -> Tensors:
    """The tensors in these dtypes, in turn."""
    return {name: value.to(dtypes[i % len(dtypes)]) for i, (name, value) in enumerate(tensors.items())}


def with_large(tensors: Tensors, value: float) -> Tensors:
    """The same with one large element in v_proj's B, and A so small there that it does no harm."""
    a_name = BIG.replace("lora_B", "lora_A")
    large = {name: tensor.double() for name, tensor in tensors.items()}
    large[a_name][1] *= 1e-5
    large[BIG][7, 1] = value
    return large


# What is served; by the name under which it is uploaded.
SERVED: dict[str, Tensors] = {
    "f32": saved(adapter(1), torch.float32),
    "f16": saved(adapter(2), torch.float16),
    "bf16": saved(adapter(3), torch.bfloat16),
    "f64": saved(adapter(4), torch.float64),
    "a32-b16": saved(adapter(5), torch.float32, torch.float16),
    "all-mixed": saved(
        adapter(6), torch.bfloat16, torch.float64, torch.float16, torch.float32, torch.float16
    ),
}
# Beyond float16, within the others. 4e4 fits float16 as it is saved, not with its scale of 2 multiplied in.
LARGE: dict[str, Tensors] = {
    "large-f32": saved(with_large(adapter(7), 1e5), torch.float32),
    "large-bf16": saved(with_large(adapter(8), -1e5), torch.bfloat16),
    "large-f64": saved(with_large(adapter(9), 1e5), torch.float64),
    "large-f16": saved(with_large(adapter(10), 4e4), torch.float16),
}
REFUSED_DTYPES = [
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@dataclass
class Served:
    """A running stack that computes in `dtype`, and the exact answers of its adapters."""

    stack: Stack
    dtype: str
    root: Path
    base: gpt_oss_reference.Weights
    uploaded: dict[str, Tensors] = field(default_factory=dict)

    def expected(self, name: str | None) -> np.ndarray:
        """Float64 log-probabilities from the very values in the files."""
        merged = {k: v.copy() for k, v in self.base.items()}
        if name is not None:
            add(merged, self.uploaded[name])
        return gpt_oss_reference.logprobs(MODEL, merged, TOKENS)

    async def answer(self, name: str | None) -> np.ndarray:
        """The node's, at every position."""
        done = await self.stack.generate(
            TOKENS, adapter=name and f"demo/{name}", max_tokens=1, logprobs=VOCAB, prompt_logprobs=VOCAB
        )
        rows = np.full((len(TOKENS), VOCAB), np.nan)
        for row, token in zip(rows, [*done.prompt_tokens[1:], *done.tokens], strict=True):
            for top in token.top_logprobs:
                row[top.id] = top.logprob
        return rows

    async def push(self, name: str, tensors: Tensors) -> None:
        """Upload it."""
        config = config_of(
            RANK, SCALE * RANK, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        )
        await self.stack.upload(write_adapter(self.root / name, tensors, config), f"demo/{name}")

    async def refusal(self, name: str, tensors: Tensors) -> grpc.aio.AioRpcError:
        """The error that an upload ends with."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.push(name, tensors)
        return caught.value


def add(weights: gpt_oss_reference.Weights, tensors: Tensors) -> None:
    """Add an adapter's deltas, in float64."""
    t = {name.removeprefix(PREFIX): value.double().numpy() for name, value in tensors.items()}
    for module in (Q, V, ROUTER):
        weights[f"{module}.weight"] += SCALE * t[f"{module}.lora_B.weight"] @ t[f"{module}.lora_A.weight"]
    for module, name in ((f"{EXPERTS}.base_layer", "gate_up_proj"), (EXPERTS, "down_proj")):
        a, b = t[f"{module}.lora_A.weight"], t[f"{module}.lora_B.weight"]
        for expert in range(MODEL["num_local_experts"]):
            own_a = a[expert * RANK : (expert + 1) * RANK]
            own_b = np.stack([b[:, r * MODEL["num_local_experts"] + expert] for r in range(RANK)], axis=1)
            weights[f"{EXPERTS}.{name}"][expert] += SCALE * (own_b @ own_a).T


def distance(got: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference, relative to the expected log-probabilities'."""
    return float(np.sqrt(((got - expected) ** 2).mean() / (expected**2).mean()))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(DTYPES))
async def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    """A stack whose base is stored in the dtype in which it computes, with the adapters uploaded."""
    dtype: str = request.param
    root = tmp_path_factory.mktemp("dtypes")
    weights = {k: torch.from_numpy(v).to(DTYPES[dtype]) for k, v in make_weights(MODEL).items()}
    model = write_gpt_oss(root / "model", {}, **FIELDS, torch_dtype=dtype)
    save_file(weights, model / "model.safetensors")
    write_byte_tokenizer(model, VOCAB)
    flags = ["--max-top-logprobs", str(VOCAB)]
    async with Stack(model, root / "stack", node_flags=flags, dtype=dtype) as stack:
        found = Served(stack, dtype, root, {k: v.double().numpy() for k, v in weights.items()})
        for name, tensors in SERVED.items():
            await found.push(name, tensors)
            found.uploaded[name] = tensors
        for name in SERVED:
            await stack.wait_known(f"demo/{name}")
        yield found


async def test_every_float_dtype_is_within_a_percent(served: Served) -> None:
    """Alone and all in one batch, whatever the base's dtype; and the adapter's effect is far above that."""
    names: list[str | None] = [None, *SERVED]
    expected = {name: served.expected(name) for name in names}
    together = await asyncio.gather(*(served.answer(name) for name in names))
    for name, rows in zip(names, together, strict=True):
        assert distance(rows, expected[name]) < 0.01, name
        assert distance(await served.answer(name), expected[name]) < 0.01, name
        if name is not None:
            assert distance(expected[None], expected[name]) > 0.1


async def test_large_values_are_served_where_they_can_be_computed(served: Served) -> None:
    """1e5 is beyond float16: there the upload is refused and names the tensor; elsewhere it is as exact."""
    for name, tensors in LARGE.items():
        if served.dtype == "float16":
            error = await served.refusal(name, tensors)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert BIG in str(error.details())
            assert "beyond the range of float16" in str(error.details())
            continue
        await served.push(name, tensors)
        served.uploaded[name] = tensors
        await served.stack.wait_known(f"demo/{name}")
        expected = served.expected(name)
        assert distance(await served.answer(name), expected) < 0.01, name
        served.uploaded[name] = tensors | {BIG: torch.zeros_like(tensors[BIG])}
        assert distance(served.expected(name), expected) > 0.02, "the large value does too little to be seen"


@pytest.mark.parametrize("dtype", REFUSED_DTYPES, ids=str)
async def test_what_is_no_float_of_two_bytes_or_more_is_refused(served: Served, dtype: torch.dtype) -> None:
    """Integers and 8-bit floats are quantized weights without their scales: refused, the tensor named."""
    tensors = SERVED["f32"] | {BIG: SERVED["f32"][BIG].to(dtype)}
    error = await served.refusal("refused", tensors)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert BIG in str(error.details())
    assert "dtype" in str(error.details())


@pytest.mark.parametrize("value", [1e300, -3.5e38, float("nan"), float("inf")])
async def test_what_no_compute_dtype_holds_is_refused(served: Served, value: float) -> None:
    """Beyond float32, which every node converts to on the way, or no number at all."""
    error = await served.refusal("refused", saved(with_large(adapter(11), value), torch.float64))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert BIG in str(error.details())


async def test_refusals_leave_no_trace(served: Served) -> None:
    """No adapter of that name, and the others answer as before."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.answer("refused")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    for name in (None, *SERVED):
        assert distance(await served.answer(name), served.expected(name)) < 0.01, name


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="function")
async def test_a_node_that_computes_in_less_than_the_adapter_needs_says_so(tmp_path: Path) -> None:
    """Accepted for a float32 node, which then restarts in float16: a clear error, the others still served."""
    model = write_gpt_oss(tmp_path / "model", make_weights(MODEL), **FIELDS)
    write_byte_tokenizer(model, VOCAB)
    flags = ["--max-top-logprobs", str(VOCAB)]
    async with Stack(model, tmp_path / "stack", node_flags=flags) as stack:
        base = {k: v.astype(np.float64) for k, v in make_weights(MODEL).items()}
        served = Served(stack, "float32", tmp_path, base)
        for name, tensors in (("large", LARGE["large-f32"]), ("small", SERVED["f32"])):
            await served.push(name, tensors)
            served.uploaded[name] = tensors
            await stack.wait_known(f"demo/{name}")
            assert distance(await served.answer(name), served.expected(name)) < 0.01
        await asyncio.to_thread(stack.node.stop)
        stack.node.command[stack.node.command.index("float32")] = "float16"
        stack.node.start()
        await stack.ready()
        await stack.wait_known("demo/small")
        assert distance(await served.answer("small"), served.expected("small")) < 0.01
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.answer("large")
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "layers.0.v: B times its scaling overflows float16" in str(caught.value.details())
        assert distance(await served.answer(None), served.expected(None)) < 0.01
