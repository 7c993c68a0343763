"""gRPC's default limit of 4,194,304 bytes a message gets in nobody's way, in either direction.

Sources: grpc/grpc.io#1254, pachyderm/pachyderm#1774, src-d/lookout#143.
"""

import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from lorikeet.adapters.v1 import adapter_pb2
from lorikeet.inference.v1 import generation_pb2
from lorikeet_bench import rigs
from tests.support.stack import Stack, make_request

pytestmark = pytest.mark.asyncio(loop_scope="session")
LIMIT = 4 << 20


def pad_header(path: Path, total: int) -> None:
    """Grow a safetensors file to exactly `total` bytes with spaces after its JSON header."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    spare = total - len(data)
    assert spare >= 0
    path.write_bytes(
        struct.pack("<Q", length + spare) + data[8 : 8 + length] + b" " * spare + data[8 + length :]
    )


@pytest.mark.parametrize("chunk", [64 << 10, 1 << 20, 3_900_000])
@pytest.mark.parametrize("size", [LIMIT - 1, LIMIT, LIMIT + 1])
async def test_uploads_around_the_limit(copy_stack: Stack, tmp_path: Path, size: int, chunk: int) -> None:
    """A file of any size around the limit arrives whole in chunks of any size below it."""
    directory = rigs.write_kv_watermark(tmp_path / "adapter", 12)
    pad_header(directory / "adapter_model.safetensors", size)
    reply = await copy_stack.upload(directory, "demo/sized", chunk_bytes=chunk, validate_only=True)
    assert reply.revision.report.tensors_used == 4


async def test_one_byte_is_refused_for_what_it_is(copy_stack: Stack, tmp_path: Path) -> None:
    """A one-byte file is no safetensors file; the message names the file."""
    directory = rigs.write_kv_watermark(tmp_path / "adapter", 12)
    (directory / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await copy_stack.upload(directory, "demo/sized")
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "adapter_model.safetensors" in str(error.value.details())


async def test_too_large_is_refused_before_any_chunk(copy_stack: Stack) -> None:
    """A header that announces more than the maximum fails at once and names it; nothing stays behind."""
    staged_before = sorted(p for p in copy_stack.root.rglob("*") if "staging" in p.parts)

    async def header_only() -> AsyncIterator[adapter_pb2.UploadRequest]:
        head = adapter_pb2.FileHeader(name="adapter_model.safetensors", size_bytes=1 << 50, sha256="0" * 64)
        config = adapter_pb2.FileHeader(name="adapter_config.json", size_bytes=2, sha256="0" * 64)
        yield adapter_pb2.UploadRequest(
            header=adapter_pb2.UploadHeader(adapter="demo/huge", files=[config, head])
        )

    with pytest.raises(grpc.aio.AioRpcError) as error:
        await copy_stack.adapters().Upload(header_only(), metadata=copy_stack.auth(), timeout=10)
    assert error.value.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert "maximum" in str(error.value.details())
    assert sorted(p for p in copy_stack.root.rglob("*") if "staging" in p.parts) == staged_before


async def test_a_damaged_upload_is_refused_and_cleared(copy_stack: Stack, tmp_path: Path) -> None:
    """A sha256 that does not match fails the upload."""
    directory = rigs.write_kv_watermark(tmp_path / "adapter", 12)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await copy_stack.upload(directory, "demo/damaged", sha256="0" * 64)
    assert error.value.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS}
    assert "sha256" in str(error.value.details())


async def test_two_million_prompt_tokens_are_refused_for_their_length(copy_stack: Stack) -> None:
    """The context limit is named, not the message's size."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await copy_stack.generate([5] * 2_000_000, max_tokens=1)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "2000000" in str(error.value.details()).replace(",", "")


@pytest.mark.parametrize("count", [500, pytest.param(8000, marks=pytest.mark.long)])
async def test_a_long_unary_reply_with_log_probabilities(copy_stack: Stack, count: int) -> None:
    """20 log-probabilities for each of up to 8000 tokens come back in one message, default limits."""
    request = make_request([5], max_tokens=count, logprobs=20)
    reply = await copy_stack.inference().Complete(
        generation_pb2.CompleteRequest(request=request), metadata=copy_stack.auth(), timeout=280
    )
    assert [t.id for t in reply.tokens] == [5] * count
    assert all(len(t.top_logprobs) == 20 for t in reply.tokens)


@pytest.mark.long
async def test_a_300_megabyte_adapter(tmp_path: Path) -> None:
    """Uploaded in chunks, stored whole, served; the node runs dummy weights of the same shape."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
        "vocab_size": 64, "hidden_size": 256, "intermediate_size": 64, "moe_intermediate_size": 64,
        "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "num_experts": 256, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": True, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    }  # fmt: skip
    import numpy as np

    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    rigs.write_byte_tokenizer(base, 64)
    rng = np.random.default_rng(5)
    experts, rank, hidden, width = 256, 64, 256, 64
    tensors = {}
    for layer in range(7):
        name = f"base_model.model.model.layers.{layer}.mlp.experts"
        tensors |= {
            f"{name}.base_layer.lora_A.weight": rng.standard_normal((experts * rank, hidden), np.float32)
            * 0.01,
            f"{name}.base_layer.lora_B.weight": rng.standard_normal((2 * width, rank * experts), np.float32)
            * 0.01,
            f"{name}.lora_A.weight": rng.standard_normal((experts * rank, width), np.float32) * 0.01,
            f"{name}.lora_B.weight": rng.standard_normal((hidden, rank * experts), np.float32) * 0.01,
        }
    adapter = rigs.write_adapter(
        tmp_path / "adapter", tensors, r=rank, alpha=rank, target_modules=[],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )  # fmt: skip
    size = (adapter / "adapter_model.safetensors").stat().st_size
    assert size > 300_000_000
    flags = [
        "--load-format",
        "dummy",
        "--adapter-arena-bytes",
        "600000000",
        "--host-pool-bytes",
        "1200000000",
    ]
    async with Stack(base, tmp_path / "stack", node_flags=flags, dtype="bfloat16") as stack:
        reply = await stack.upload(adapter, "demo/large")
        assert reply.revision.payload_bytes >= size * 0.95
        await stack.wait_known("demo/large", reply.revision.digest, timeout_s=60)
