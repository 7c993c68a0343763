"""Nothing compiles after warm-up, whatever the batch."""

import time

import torch
import triton

from lorikeet_kernels.lora.lora_linear import lora_linear
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.moe_groups import make_moe_groups
from lorikeet_kernels.lora.moe_lora import moe_lora_down, moe_lora_gate_up
from lorikeet_kernels.testing import SiteShape, SlotSite, make_tables
from lorikeet_kernels.warm_up import warm_up_linear, warm_up_moe

GPU = torch.device("cuda")
HIDDEN, INNER, EXPERTS, TOP_K, MAX_TOKENS = 2880, 2880, 8, 4, 1100


def test_three_hundred_batches_compile_nothing() -> None:
    """Random lengths, adapters, ranks and skew after warm-up: the compile hook stays silent."""
    ranks = (4, 8, 16, 24, 64, 0)
    sites = [SiteShape(HIDDEN, 2 * INNER, EXPERTS), SiteShape(INNER, HIDDEN, EXPERTS)]
    slots = [[SlotSite(r, 1 + s % 2), SlotSite(r)] for s, r in enumerate(ranks)]
    tables = make_tables(sites, slots, dtype=torch.bfloat16, device=GPU)
    workspace = LoraWorkspace(GPU)
    compiled: list[str] = []

    def hook(*_args: object, **kwargs: object) -> None:
        compiled.append(str(kwargs.get("repr")))

    triton.knobs.runtime.jit_post_compile_hook = hook
    try:
        started = time.monotonic()
        batches = warm_up_moe(
            tables,
            workspace,
            hidden=HIDDEN,
            inner=INNER,
            num_experts=EXPERTS,
            top_k=TOP_K,
            gate_up_site=0,
            down_site=1,
            row_order="interleaved",
            max_tokens=MAX_TOKENS,
        )
        torch.cuda.synchronize()
        elapsed_s = time.monotonic() - started
        print(f"warm-up: {batches} batches, {len(compiled)} kernels, {elapsed_s:.1f} s")
        compiled.clear()
        generator = torch.Generator().manual_seed(0)
        for _ in range(300):
            limit = int(torch.randint(1, 12, (1,), generator=generator))
            num_tokens = int(torch.randint(1, min(MAX_TOKENS, 2**limit) + 1, (1,), generator=generator))
            used = int(torch.randint(1, len(ranks) + 1, (1,), generator=generator))
            token_slot = torch.randint(-1, used, (num_tokens,), generator=generator, dtype=torch.int32).to(
                GPU
            )
            ids = torch.rand(num_tokens, EXPERTS, generator=generator).topk(TOP_K, dim=1).indices
            ids = ids.to(torch.int32).to(GPU)
            segments = make_lora_segments(token_slot, len(ranks), workspace)
            groups = make_moe_groups(ids, segments, EXPERTS)
            x = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16, device=GPU)
            act = torch.zeros(num_tokens, TOP_K, INNER, dtype=torch.bfloat16, device=GPU)
            out = torch.zeros(num_tokens, TOP_K, 2 * INNER, dtype=torch.bfloat16, device=GPU)
            down = torch.zeros(num_tokens, TOP_K, HIDDEN, dtype=torch.bfloat16, device=GPU)
            weights = torch.zeros(num_tokens, TOP_K, device=GPU)
            moe_lora_gate_up(out, x, ids, groups, segments, tables, 0, "interleaved")
            moe_lora_down(down, act, ids, weights, groups, segments, tables, 1)
        torch.cuda.synchronize()
        assert compiled == []
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None


def test_dense_batches_compile_nothing() -> None:
    """A fused q, k and v of random lengths and adapters: by token, by segment and grouped."""
    widths, sites = (256, 64, 64), (0, 1, 2)
    rows = [[SlotSite(r)] * len(widths) for r in (4, 8, 16, 24, 32, 0)]
    tables = make_tables([SiteShape(HIDDEN, w) for w in widths], rows, dtype=torch.bfloat16, device=GPU)
    workspace = LoraWorkspace(GPU)
    shape = {"in_features": HIDDEN, "sites": sites, "out_features": widths, "num_slices": None}
    warm_up_linear(tables, workspace, **shape, max_tokens=MAX_TOKENS, beside_tokens=range(1, 65))
    torch.cuda.synchronize()
    compiled: list[str] = []

    def hook(*_args: object, **kwargs: object) -> None:
        compiled.append(str(kwargs.get("repr")))

    triton.knobs.runtime.jit_post_compile_hook = hook
    try:
        generator = torch.Generator().manual_seed(0)
        for _ in range(300):
            limit = int(torch.randint(1, 12, (1,), generator=generator))
            num_tokens = int(torch.randint(1, min(MAX_TOKENS, 2**limit) + 1, (1,), generator=generator))
            used = int(torch.randint(1, len(rows) + 1, (1,), generator=generator))
            token_slot = torch.randint(-1, used, (num_tokens,), generator=generator, dtype=torch.int32)
            segments = make_lora_segments(token_slot.to(GPU), len(rows), workspace)
            x = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16, device=GPU)
            out = torch.zeros(num_tokens, sum(widths), dtype=torch.bfloat16, device=GPU)
            lora_linear(out, x, segments, tables, sites, widths)
            if num_tokens <= 64:
                lora_linear(out.float(), x, segments, tables, sites, widths, accumulate=False)
        torch.cuda.synchronize()
        assert compiled == []
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
