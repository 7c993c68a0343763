"""After the base ops' warm-up nothing compiles, whatever the batches."""

from dataclasses import replace

import pytest
import torch

from lorikeet_kernels.attention.attention_metadata import AttentionMetadata
from lorikeet_kernels.attention.paged_attention import paged_attention
from lorikeet_kernels.dense.gated_activation import GatedActivation
from lorikeet_kernels.experts.moe_experts import ExpertProjection, ExpertsLora, moe_experts
from lorikeet_kernels.experts.mxfp4 import Mxfp4Weight
from lorikeet_kernels.experts.mxfp4_layout import lay_out_mxfp4
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.side_stream import SideStream
from lorikeet_kernels.sampling.penalties import Penalties, penalize
from lorikeet_kernels.sampling.sampling import SamplingBatch, sample
from lorikeet_kernels.sampling.token_bitmask import num_mask_words, token_bitmask
from lorikeet_kernels.testing import SiteShape, SlotSite, make_tables
from lorikeet_kernels.tiling.lora_overlap import BesideRows
from lorikeet_kernels.warm_up import warm_up_moe
from lorikeet_kernels.warm_up_base import warm_up_attention, warm_up_experts, warm_up_sampling
from tests.support.fp8_matrices import fp8_matrices

GPU = torch.device("cuda")
BF16 = torch.bfloat16


@pytest.mark.parametrize("kind", ["mxfp4", "bf16", "fp8"])
def test_experts(kind: str, compiled: list[str]) -> None:
    """Random numbers of tokens, with and without adapters."""
    experts, hidden, inner, top_k, most = 8, 128, 64, 2, 600
    activation = GatedActivation(1.702, 7.0, 1.0)

    def projection(rows: int, columns: int, *, is_gate_up: bool) -> ExpertProjection:
        order = "interleaved" if is_gate_up else None
        bias = torch.zeros(experts, rows, dtype=BF16, device=GPU)
        if kind == "bf16":
            return ExpertProjection(torch.zeros(experts, rows, columns, dtype=BF16, device=GPU), bias, order)
        if kind == "fp8":
            heights = (inner, inner) if is_gate_up else (rows,)
            matrices = fp8_matrices((experts, rows, columns), "block", heights, is_interleaved=is_gate_up)
            return ExpertProjection(matrices, bias, order)
        blocks = torch.zeros(experts, rows, columns // 32, 16, dtype=torch.uint8, device=GPU)
        return ExpertProjection(
            lay_out_mxfp4(Mxfp4Weight(blocks, blocks[..., 0].contiguous()), pairing=order), bias, order
        )

    gate_up = projection(2 * inner, hidden, is_gate_up=True)
    down = projection(hidden, inner, is_gate_up=False)
    sites = [SiteShape(hidden, 2 * inner, experts), SiteShape(inner, hidden, experts)]
    tables = make_tables(sites, [[SlotSite(8), SlotSite(8)]] * 2, dtype=BF16, device="cuda")
    workspace, side = LoraWorkspace(GPU), SideStream.on(GPU, BesideRows())

    def adapters(num_tokens: int) -> ExpertsLora:
        slots = torch.randint(-1, 2, (num_tokens,), dtype=torch.int32, device=GPU)
        return ExpertsLora(make_lora_segments(slots, 2, workspace), tables, 0, 1, side)

    warm_up_moe(
        tables, workspace, hidden=hidden, inner=inner, num_experts=experts, top_k=top_k, gate_up_site=0,
        down_site=1, row_order="interleaved", max_tokens=most,
    )  # fmt: skip
    count = warm_up_experts(
        gate_up, down, activation, dtype=BF16, top_k=top_k, max_tokens=most, lora=adapters(1)
    )
    assert 3 <= count < 60
    compiled.clear()
    generator = torch.Generator().manual_seed(0)
    for _ in range(80):
        num_tokens = int(torch.randint(1, most + 1, (1,), generator=generator)) % 2 ** int(
            torch.randint(1, 11, (1,), generator=generator)
        )
        num_tokens = max(1, num_tokens)
        x = torch.zeros(num_tokens, hidden, dtype=BF16, device=GPU)
        ids = torch.rand(num_tokens, experts, device=GPU).topk(top_k, dim=1).indices.to(torch.int32)
        weights = torch.rand(num_tokens, top_k, device=GPU)
        beside = adapters(num_tokens)
        for lora in (None, replace(beside, side=None), beside):
            moe_experts(x, weights, ids, gate_up, down, activation, lora=lora)
    torch.cuda.synchronize()
    assert compiled == []


def test_attention_and_sampling(compiled: list[str]) -> None:
    """Batches of decodes and mixed ones, short and long tables, all kinds of rows."""
    caches = torch.zeros(2, 80, 16, 2, 64, dtype=BF16, device=GPU)
    sinks = torch.zeros(8, dtype=BF16, device=GPU)
    warm_up_attention(
        caches[0],
        caches[1],
        dtype=BF16,
        num_heads=8,
        scale=0.125,
        max_requests=40,
        max_tokens=4096,
        sinks=sinks,
    )
    warm_up_sampling(5000, BF16, 40)
    compiled.clear()
    for num_requests, width, extra in (
        (1, 1, 0),
        (3, 256, 0),
        (40, 7, 9),
        (17, 100, 1),
        (2, 255, 300),
        (40, 256, 0),
    ):
        rows = num_requests + extra
        starts = torch.arange(num_requests + 1, dtype=torch.int32, device=GPU)
        starts[-1] = rows
        metadata = AttentionMetadata(
            query_starts=starts,
            sequence_lens=torch.full(
                (num_requests,), min(16 * width, extra + 1), dtype=torch.int32, device=GPU
            ),
            block_tables=torch.zeros((num_requests, width), dtype=torch.int32, device=GPU),
            slot_mapping=torch.zeros(0, dtype=torch.int64, device=GPU),
            query_starts_host=(),
            sequence_lens_host=(),
        )
        q = torch.zeros(rows, 12, 64, dtype=BF16, device=GPU)[:, :8]
        paged_attention(
            q, caches[0], caches[1], metadata, 0.125, torch.empty_like(q).contiguous(), sinks=sinks
        )
        at = torch.arange(num_requests, device=GPU)
        for temperature, top_p, top_k, min_p in (
            (0.0, 1.0, 0, 0.0),
            (1.0, 1.0, 0, 0.0),
            (0.7, 0.5, 0, 0.0),
            (0.7, 1.0, 9, 0.0),
            (0.7, 0.5, 9, 0.1),
        ):
            batch = SamplingBatch(
                torch.full((num_requests,), temperature, device=GPU), torch.full_like(at, top_k),
                torch.full((num_requests,), top_p, device=GPU), at, at, temperature == 0,
                any_cut=top_p < 1 or top_k > 0, any_top_k=top_k > 0, any_top_p=top_p < 1,
                min_p=torch.full((num_requests,), min_p, device=GPU) if min_p else None,
            )  # fmt: skip
            logits = torch.randn(num_requests, 5000, device=GPU)
            sample(logits.to(BF16), batch)
            ones = torch.ones(num_requests, device=GPU)
            counts = torch.ones(num_requests, 5000, dtype=torch.int32, device=GPU)
            penalize(logits, Penalties(counts, at.clone(), at.clone(), 2 * ones, ones, -ones))
            masks = torch.full((num_requests, num_mask_words(5000)), -1, dtype=torch.int32, device=GPU)
            token_bitmask(logits, masks, at.clone())
            sample(logits, batch)
    torch.cuda.synchronize()
    assert compiled == []
