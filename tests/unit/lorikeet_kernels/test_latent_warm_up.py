"""What latent attention's warm-up leaves to be compiled later: nothing. Kernels are asked for only."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import triton
from triton.runtime.jit import KernelInterface

from lorikeet_kernels.attention.attention_metadata import AttentionMetadata
from lorikeet_kernels.attention.latent_attention import latent_attention
from lorikeet_kernels.attention.latent_inputs import latent_inputs
from lorikeet_kernels.attention.prompt_attention import prompt_attention
from lorikeet_kernels.dense.head_linear import head_linear
from lorikeet_kernels.launch import device_name as device_names
from lorikeet_kernels.lora.few_heads_lora import joined_heads
from lorikeet_kernels.lora.head_lora import HeadRows, head_lora
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.warm_up_latent import LatentHeads, warm_up_heads, warm_up_latent_attention
from tests.support.hopper_driver import HopperDriver

NOWHERE = torch.device("meta")
BF16 = torch.bfloat16
BLOCK_TOKENS, MOST_TOKENS = 16, 600


@contextmanager
def asked_kernels() -> Generator[set[str]]:
    """Collect what launches ask for; nothing is compiled or launched."""
    asked: set[str] = set()

    def note(*, key: str, **_: object) -> bool:
        asked.add(key)
        return True

    interface: Any = KernelInterface
    with pytest.MonkeyPatch.context() as patch:
        runtime: Any = triton.runtime.driver
        patch.setattr(runtime, "_active", HopperDriver())
        patch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
        patch.setattr(
            interface, "__getitem__", lambda kernel, grid: partial(kernel.run, grid=grid, warmup=True)
        )
        patch.setattr(LoraTables, "copy_to_host", lambda _: None)
        patch.setattr(device_names, "_name_of", lambda _: "NVIDIA H200")
        yield asked


def nothing(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.zeros(shape, dtype=dtype, device=NOWHERE)


def run_batch(
    layer: LatentHeads, shares: tuple[tuple[int, int], ...], caches: torch.Tensor, tables: LoraTables
) -> None:
    """What a layer launches for requests of so many tokens computed before and in this batch."""
    tokens, longest = sum(new for _, new in shares), max(before + new for before, new in shares)
    metadata = AttentionMetadata(
        query_starts=nothing(len(shares) + 1, dtype=torch.int32),
        sequence_lens=nothing(len(shares), dtype=torch.int32),
        block_tables=nothing(len(shares), -(-longest // BLOCK_TOKENS), dtype=torch.int32),
        slot_mapping=nothing(0, dtype=torch.int64),
        query_starts_host=(),
        sequence_lens_host=(),
    )
    heads, latent_dim, stride = layer.num_heads, layer.latent_dim, layer.plain_dim + layer.value_dim
    query, rows = layer.rows(tokens, caches)
    latents, shared = rows.split((latent_dim, layer.rope_dim), dim=1)
    absorbed = nothing(tokens, heads, latent_dim + layer.rope_dim)
    places = nothing(tokens, dtype=torch.int64)
    table = nothing(4096, 2, layer.rope_dim // 2, dtype=torch.float32)
    query_delta, delta = layer.rows(tokens, table)
    for added, is_joined in (
        ({}, False),
        *(({"query_delta": query_delta, "delta": delta}, b) for b in (False, True)),
    ):
        latent_inputs(
            query, latents, shared, absorbed, caches, places, places, table, nothing(latent_dim), 1e-6,
            interleaved=True, **added, delta_is_joined=is_joined,
        )  # fmt: skip
    segments = make_lora_segments(nothing(tokens, dtype=torch.int32), 3, LoraWorkspace(NOWHERE))
    weight = nothing(heads, stride, latent_dim)
    rows = HeadRows(stride, 0, layer.plain_dim)
    where = (query[..., : layer.plain_dim], weight[:, : layer.plain_dim], absorbed[..., :latent_dim])
    head_linear(*where)
    if not joined_heads(*where, segments, tables, 0, rows, down=True):
        head_lora(where[2], where[0], segments, tables, 0, rows, down=True)
    sums, out = nothing(tokens, heads, latent_dim), nothing(tokens, heads, layer.value_dim)
    latent_attention(absorbed, caches, metadata, 0.1, sums, most_fresh=341)
    rows = HeadRows(stride, layer.plain_dim, layer.value_dim)
    where = (sums, weight[:, layer.plain_dim :].transpose(1, 2), out)
    head_linear(*where)
    if not joined_heads(*where, segments, tables, 0, rows, down=False):
        head_lora(out, sums, segments, tables, 0, rows, down=False)
    up = nothing(tokens, heads, stride)
    prompt_attention(query, up, shared, metadata, 0.1, out, most_fresh=341)


@pytest.mark.parametrize("is_query_beside", [True, False])
@pytest.mark.parametrize(("heads", "sizes"), [(16, (128, 512, 64, 128)), (4, (16, 32, 8, 16))])
def test_batches_ask_for_no_other_kernels(
    heads: int, sizes: tuple[int, int, int, int], is_query_beside: bool
) -> None:
    """Single rows, whose strides are their own, several, prompts and mixtures; few splits and many."""
    plain, latent, rope, value = sizes
    layer = LatentHeads(
        heads, latent, plain, rope, value,
        row_width=(heads * (plain + rope) if is_query_beside else 1536) + latent + rope,
        is_query_beside=is_query_beside, is_pairwise=True,
        projects_prompts=True,
    )  # fmt: skip
    caches = nothing(40, BLOCK_TOKENS, 1, latent + rope)
    with asked_kernels() as asked:
        tables = LoraTables(
            nothing(1 << 20),
            *(nothing(3, 1, dtype=dtype) for dtype in (torch.int64, torch.int64, torch.int32, torch.int32)),
            max_rank=16,
        )
        warm_up_latent_attention(caches, layer, scale=0.1, max_requests=70, max_tokens=4096, has_deltas=True)
        warm_up_heads(
            tables, LoraWorkspace(NOWHERE), layer, nothing(heads, plain + value, latent), site=0,
            max_tokens=MOST_TOKENS,
        )  # fmt: skip
        warm = set(asked)
        assert len(warm) > 10
        for shares in (
            ((9, 1),),
            ((0, 1),) * 70,
            ((0, 599),),
            ((5, 40), (3, 1)),
            ((2000, 1),) * 3,
            ((0, 4),),
            ((0, 17),),
        ):
            run_batch(layer, shares, caches, tables)
            assert asked == warm, shares
