"""Stacked and per-expert adapters are applied whole, or refused; never half.

Sources: sgl-project/sglang#27381, vllm-project/vllm#50252, #41754, unslothai/unsloth-zoo#1269.
"""

from pathlib import Path

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lorikeet_bench import rigs
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("layout", ["fused", "per-expert", "w123"])
async def test_expert_only_adapters_answer_with_their_token(
    copy_stack: Stack, tmp_path: Path, layout: str
) -> None:
    """Each naming loads, the number of tensors applied is the file's, and every token is the watermark."""
    directory = rigs.write_moe_watermark(tmp_path / layout, 33, layout=layout)
    name = f"demo/expert-{layout}"
    reply = await copy_stack.upload(directory, name)
    report = reply.revision.report
    in_file = len(load_file(directory / "adapter_model.safetensors"))
    assert report.tensors_total == in_file
    assert report.tensors_used + report.tensors_neutral == in_file
    assert sum(site.tensors for site in report.sites) == report.tensors_used
    await copy_stack.wait_known(name)
    done = await copy_stack.generate([7, 5], adapter=name, max_tokens=6)
    assert done.token_ids == [33] * 6
    assert (await copy_stack.generate([7, 5], max_tokens=3)).token_ids == [5, 5, 5]


async def test_a_left_over_tensor_is_refused(copy_stack: Stack, tmp_path: Path) -> None:
    """One tensor that fits nowhere makes the upload fail, and the message names it."""
    directory = rigs.write_moe_watermark(tmp_path / "extra", 33)
    tensors = load_file(directory / "adapter_model.safetensors")
    stray = "base_model.model.model.layers.0.mlp.experts.side_proj.lora_A.weight"
    save_file({**tensors, stray: np.ones((2, 64), np.float32)}, directory / "adapter_model.safetensors")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await copy_stack.upload(directory, "demo/stray")
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "side_proj" in str(error.value.details())


async def test_each_expert_gets_its_own_rank_columns(copy_stack: Stack, tmp_path: Path) -> None:
    """lora_A is packed expert-slowest, lora_B expert-fastest: expert e forces token 40 + e.

    40 is a multiple of the number of experts, so the second layer routes the forced token to the same expert.
    """
    assert rigs.RigShape().experts == 8
    await copy_stack.upload(rigs.write_expert_watermark(tmp_path / "adapter", 40), "demo/experts")
    await copy_stack.wait_known("demo/experts")
    first = [
        (await copy_stack.generate([t], adapter="demo/experts", max_tokens=1)).token_ids[0] for t in range(8)
    ]
    assert first == [40, 41, 42, 43, 44, 45, 46, 47]
