"""DoRA and biases are refused by name, wherever they stand, however they are said; plain LoRA is not.

Sources: vllm-project/vllm#47395, #5733, ROCm/ATOM#816, huggingface/peft#2237.
"""

from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file

from lorikeet.adapters.v1 import adapter_pb2
from lorikeet_bench import rigs
from lorikeet_rpc.errors import from_rpc_error
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")
WEIGHTS = "adapter_model.safetensors"
ATTENTION = "base_model.model.model.layers.0.self_attn.q_proj"
# Every kind of module that a rig has: attention, router, experts stacked, packed and one by one, the head.
MODULES = (
    ATTENTION,
    "base_model.model.model.layers.1.mlp.gate",
    "base_model.model.model.layers.0.mlp.experts",
    "base_model.model.model.layers.0.mlp.experts.base_layer",
    "base_model.model.model.layers.0.mlp.experts.gate_up_proj",
    "base_model.model.model.layers.0.mlp.experts.3.down_proj",
    "base_model.model.lm_head",
    "base_model.model.model.embed_tokens",
    "model.layers.0.self_attn.q_proj",
    "base_model.model.model.language_model.layers.0.self_attn.q_proj",
)
# The tensors that these features add, as PEFT's versions and raw state dicts name them.
DORA = ("lora_magnitude_vector", "lora_magnitude_vector.weight", "lora_magnitude_vector.default.weight")
BIASES = ("lora_B.bias", "lora_B.default.bias", "lora_A.bias", "bias", "base_layer.bias")
FLAGS: tuple[dict[str, Any], ...] = (
    {"use_dora": True},
    {"lora_bias": True},
    {"bias": "all"},
    {"bias": "lora_only"},
    {"use_dora": 1},
    {"lora_bias": "yes"},
)


def adapter(directory: Path, extra: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    """A watermark of token 33 on the experts with a pair on q_proj, more tensors and more configuration."""
    rigs.write_moe_watermark(directory, 33)
    tensors = load_file(directory / WEIGHTS)
    pair = {
        f"{ATTENTION}.lora_A.weight": np.ones((2, 64), np.float32),
        f"{ATTENTION}.lora_B.weight": np.zeros((64, 2), np.float32),
    }
    rigs.write_adapter(directory, {**tensors, **pair, **(extra or {})}, r=2, alpha=2, target_parameters=[
        "mlp.experts.gate_up_proj", "mlp.experts.down_proj",
    ], **config)  # fmt: skip
    return directory


async def refusal(stack: Stack, directory: Path) -> str:
    """The message that an upload is refused with; nothing may be left of it."""
    name = f"demo/{directory.name}"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.upload(directory, name)
    failure = from_rpc_error(caught.value)
    assert (failure.code, failure.reason) == ("INVALID_ARGUMENT", "UNSUPPORTED_ADAPTER")
    listed = await stack.adapters().ListAdapters(
        adapter_pb2.ListAdaptersRequest(page_size=1000), metadata=stack.auth(), timeout=10
    )
    assert not [a.name for a in listed.adapters if a.name.endswith(directory.name)]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.generate([1], adapter=name, max_tokens=1)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    return failure.message


@pytest.mark.parametrize("tensor", [*DORA, *BIASES])
async def test_a_tensor_of_such_a_feature_is_refused_by_name(
    copy_stack: Stack, tmp_path: Path, tensor: str
) -> None:
    """On every kind of module, with no flag in the configuration that would tell."""
    word = "DoRA" if tensor in DORA else "bias"
    for number, module in enumerate(MODULES):
        extra = {f"{module}.{tensor}": np.ones(64, np.float32)}
        message = await refusal(copy_stack, adapter(tmp_path / f"tensor-{number}", extra))
        assert word in message
        # Of a long name the middle is left out.
        assert f"{module}.{tensor}"[-48:] in message


@pytest.mark.parametrize("flag", FLAGS, ids=str)
@pytest.mark.parametrize("tensor", ["", "lora_magnitude_vector", "lora_B.bias"])
async def test_a_flag_is_refused_by_name(
    copy_stack: Stack, tmp_path: Path, flag: dict[str, Any], tensor: str
) -> None:
    """With its tensor, with another feature's, and without any: what it would compute is not known then."""
    extra = {f"{ATTENTION}.{tensor}": np.ones(64, np.float32)} if tensor else {}
    message = await refusal(copy_stack, adapter(tmp_path / "flag", extra, **flag))
    assert next(iter(flag)) in message


async def test_the_same_adapter_without_them_is_served(copy_stack: Stack, tmp_path: Path) -> None:
    """Flags that say no, or nothing, refuse nobody: PEFT writes them all."""
    for number, flags in enumerate(
        ({}, {"use_dora": False, "lora_bias": False, "bias": "none"}, {"use_dora": None, "bias": None})
    ):
        name = f"demo/plain-{number}"
        await copy_stack.upload(adapter(tmp_path / f"plain-{number}", **flags), name)
        await copy_stack.wait_known(name)
        assert (await copy_stack.generate([7, 5], adapter=name, max_tokens=3)).token_ids == [33] * 3
