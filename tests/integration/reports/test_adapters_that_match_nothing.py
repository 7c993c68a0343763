"""An adapter whose keys match nothing is refused with the offending names; it never serves the base.

Sources: vllm-project/vllm#34186, #55193, ml-explore/mlx-lm#1725, invergent-ai/surogate#173.
"""

import json
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file

from lorikeet_bench import rigs
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")
Tensors = dict[str, np.ndarray]


def renamed(change: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    """A mutation of every key."""
    return lambda tensors: {change(k): v for k, v in tensors.items()}


def only_a(tensors: Tensors) -> Tensors:
    """lora_A without lora_B."""
    return {k: v for k, v in tensors.items() if "lora_A" in k}


def wider(tensors: Tensors) -> Tensors:
    """Shapes of a model twice as wide."""
    return {
        k: np.concatenate([v, v], axis=1) if "lora_A" in k else np.concatenate([v, v])
        for k, v in tensors.items()
    }


def one_good(tensors: Tensors) -> Tensors:
    """One good pair among bad ones."""
    first = sorted(tensors)[:2]
    return {k if k in first else k.replace("self_attn", "self_attention"): v for k, v in tensors.items()}


REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "another class's prefix": (
        renamed(lambda k: k.replace("model.model.layers", "model.vision.layers")),
        "vision",
    ),
    "layer 99": (renamed(lambda k: k.replace("layers.1.", "layers.99.")), "99"),
    "a misspelt module": (renamed(lambda k: k.replace("v_proj", "v_porj")), "v_porj"),
    "only lora_A": (only_a, "lora_B"),
    "another model's shapes": (wider, "128"),
    "one good among bad": (one_good, "self_attention"),
}
TOLERATED: dict[str, Callable[[Tensors], Tensors]] = {
    "no base_model.model prefix": renamed(lambda k: k.removeprefix("base_model.model.")),
    "the adapter's name in the key": renamed(lambda k: k.replace(".weight", ".default.weight")),
}  # fmt: skip


def write(path: Path, change: Callable[[Tensors], Tensors], **config: object) -> Path:
    """A v_proj adapter with mutated keys."""
    good = rigs.write_kv_watermark(path / "good", 12)
    tensors = load_file(good / "adapter_model.safetensors")
    return rigs.write_adapter(
        path / "mutated", change(tensors), r=1, alpha=1, target_modules=["v_proj"], **config
    )


async def refused(stack: Stack, directory: Path, name: str) -> str:
    """Upload, expect INVALID_ARGUMENT, and the name to be NOT_FOUND afterwards; returns the message."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stack.upload(directory, name)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await stack.generate([1], adapter=name, max_tokens=1)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    return str(error.value.details())


@pytest.mark.parametrize("case", REFUSED)
async def test_refused_with_the_offending_part(copy_stack: Stack, tmp_path: Path, case: str) -> None:
    """The message names the key or the shape."""
    change, named = REFUSED[case]
    message = await refused(copy_stack, write(tmp_path, change), "demo/nothing")
    assert named in message


@pytest.mark.parametrize("case", TOLERATED)
async def test_harmless_spellings_work(copy_stack: Stack, tmp_path: Path, case: str) -> None:
    """Known other spellings load and are used whole."""
    reply = await copy_stack.upload(write(tmp_path, TOLERATED[case]), "demo/spelt", validate_only=True)
    assert reply.revision.report.tensors_used == reply.revision.report.tensors_total == 4


async def test_an_all_zero_b_is_fine(copy_stack: Stack, tmp_path: Path) -> None:
    """A fresh adapter has B = 0: it loads, is reported as neutral, and answers as the base."""
    directory = write(tmp_path, lambda t: {k: v * ("lora_A" in k) for k, v in t.items()})
    reply = await copy_stack.upload(directory, "demo/zero")
    assert reply.revision.report.tensors_used + reply.revision.report.tensors_neutral == 4
    await copy_stack.wait_known("demo/zero")
    assert (await copy_stack.generate([9], adapter="demo/zero", max_tokens=3)).token_ids == [9] * 3


async def test_a_missing_alpha_is_never_a_scale_of_zero(copy_stack: Stack, tmp_path: Path) -> None:
    """Without lora_alpha the upload is refused, or takes peft's default of 8: never 0."""
    directory = write(tmp_path, lambda t: t)
    config = json.loads((directory / "adapter_config.json").read_text())
    del config["lora_alpha"]
    (directory / "adapter_config.json").write_text(json.dumps(config))
    try:
        reply = await copy_stack.upload(directory, "demo/alpha", validate_only=True)
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "lora_alpha" in str(error.details())
    else:
        assert {s for site in reply.revision.report.sites for s in site.scales} == {8.0}
