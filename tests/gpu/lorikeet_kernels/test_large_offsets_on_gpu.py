"""Offsets beyond 2^31 elements: outputs, inputs and weight stacks."""

import pytest
import torch

from lorikeet_kernels.lora.lora_linear import lora_linear
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.moe_groups import make_moe_groups
from lorikeet_kernels.lora.moe_lora import moe_lora_gate_up
from lorikeet_kernels.testing import TOLERANCE, relative_error

GPU = torch.device("cuda")
START = (1 << 31) + 128


def _linear_tables(start: int, rank: int, in_features: int, out_features: int) -> LoraTables:
    arena = torch.zeros(start + rank * (in_features + out_features) + 256, dtype=torch.bfloat16, device=GPU)
    arena[start:].normal_(0, 0.05)
    at = {"device": GPU}
    return LoraTables(
        arena,
        torch.tensor([[start]], dtype=torch.int64, **at),
        torch.tensor([[start + rank * in_features]], dtype=torch.int64, **at),
        torch.tensor([[rank]], dtype=torch.int32, **at),
        torch.tensor([[1]], dtype=torch.int32, **at),
        rank,
    )


def test_last_rows_of_a_long_output() -> None:
    """131,073 rows of 16,384 columns: the last row starts at 2^31 elements; only it has an adapter."""
    rows, columns, width, rank = 131_073, 16_384, 64, 16
    tables = _linear_tables(0, rank, width, columns)
    slots = torch.full((rows,), -1, dtype=torch.int32, device=GPU)
    slots[-1] = 0
    x = torch.randn(rows, width, device=GPU).bfloat16()
    out = torch.zeros(rows, columns, dtype=torch.bfloat16, device=GPU)
    lora_linear(out, x, make_lora_segments(slots, 1, LoraWorkspace(GPU)), tables, (0,), (columns,))
    a = tables.arena[: rank * width].view(rank, width).double()
    b = tables.arena[rank * width : rank * (width + columns)].view(columns, rank).double()
    assert relative_error(out[-1], b @ (a @ x[-1].double())) < TOLERANCE[torch.bfloat16]
    assert not out[:-1].any()


@pytest.mark.parametrize("num_tokens", [3, 600])
def test_weights_beyond_two_to_the_31(num_tokens: int) -> None:
    """A slot whose weights start past 2^31 elements, on the decode and on the grouped path."""
    tables = _linear_tables(START, 16, 64, 96)
    slots = torch.zeros(num_tokens, dtype=torch.int32, device=GPU)
    x = torch.randn(num_tokens, 64, device=GPU).bfloat16()
    out = torch.zeros(num_tokens, 96, dtype=torch.bfloat16, device=GPU)
    lora_linear(out, x, make_lora_segments(slots, 1, LoraWorkspace(GPU)), tables, (0,), (96,))
    a = tables.arena[START : START + 16 * 64].view(16, 64).double()
    b = tables.arena[START + 16 * 64 : START + 16 * 160].view(96, 16).double()
    assert relative_error(out, x.double() @ a.T @ b.T) < TOLERANCE[torch.bfloat16]


def test_experts_beyond_two_to_the_31() -> None:
    """The last of 2,100 experts of 2^20 elements each lies past 2^31 elements within one slot."""
    experts, rank, width, columns = 2100, 64, 16_384, 32
    count_a = experts * rank * width
    arena = torch.zeros(count_a + experts * columns * rank + 256, dtype=torch.bfloat16, device=GPU)
    arena[(experts - 1) * rank * width : count_a].normal_(0, 0.01)
    arena[count_a + (experts - 1) * columns * rank :].normal_(0, 0.05)
    at = {"device": GPU}
    tables = LoraTables(
        arena,
        torch.tensor([[0]], dtype=torch.int64, **at),
        torch.tensor([[count_a]], dtype=torch.int64, **at),
        torch.tensor([[rank]], dtype=torch.int32, **at),
        torch.tensor([[1]], dtype=torch.int32, **at),
        rank,
    )
    a = arena[(experts - 1) * rank * width : count_a].view(rank, width).double()
    b = arena[count_a + (experts - 1) * columns * rank : count_a + experts * columns * rank].view(
        columns, rank
    )
    for num_tokens in (2, 2000):
        slots = torch.zeros(num_tokens, dtype=torch.int32, device=GPU)
        ids = torch.full((num_tokens, 1), experts - 1, dtype=torch.int32, device=GPU)
        x = torch.randn(num_tokens, width, device=GPU).bfloat16()
        out = torch.zeros(num_tokens, 1, columns, dtype=torch.bfloat16, device=GPU)
        segments = make_lora_segments(slots, 1, LoraWorkspace(GPU))
        groups = make_moe_groups(ids, segments, experts)
        moe_lora_gate_up(out, x, ids, groups, segments, tables, 0, "concatenated")
        assert relative_error(out[:, 0], x.double() @ a.T @ b.double().T) < TOLERANCE[torch.bfloat16]
