"""Packed four-bit expert matrices: unpacked bit for bit, and multiplied as if they were not packed."""

import pytest
import torch

from lorikeet_kernels.experts.expert_linear import expert_linear
from lorikeet_kernels.experts.mxfp4 import Mxfp4Weight, dequantize_mxfp4, dequantize_mxfp4_expert
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.moe_groups import make_moe_groups

# E2M1 as the Open Compute Project's table has it: sign, two bits of exponent (bias 1), one bit of fraction.
E2M1 = [
    (-1) ** (code >> 3)
    * ((code & 1) * 0.5 if not code >> 1 & 3 else 2.0 ** ((code >> 1 & 3) - 1) * (1 + (code & 1) / 2))
    for code in range(16)
]


def random_weight(num_experts: int, out_features: int, in_features: int, seed: int = 0) -> Mxfp4Weight:
    """Any bytes are a matrix; the scales are near 1."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_experts, out_features, in_features // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(115, 127, shape, generator=generator, dtype=torch.uint8)
    return Mxfp4Weight(blocks, scales)


def unpacked(weight: Mxfp4Weight) -> torch.Tensor:
    """Element by element, in Python's integers and floats."""
    num_experts, out_features, in_features = weight.shape
    blocks, scales = weight.blocks.tolist(), weight.scales.tolist()
    rows = [
        E2M1[blocks[e][o][i // 32][i % 32 // 2] >> (4 if i % 2 else 0) & 15]
        * 2.0 ** (scales[e][o][i // 32] - 127)
        for e in range(num_experts)
        for o in range(out_features)
        for i in range(in_features)
    ]
    return torch.tensor(rows, dtype=torch.float64).view(weight.shape)


def test_every_code_at_every_scale_is_exact() -> None:
    """All 256 bytes under all 255 scales, from the subnormals to the last that overflow float32."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.arange(255, dtype=torch.uint8)
    weight = Mxfp4Weight(codes.expand(255, 1, 16, 16), scales.view(255, 1, 1).expand(255, 1, 16))
    expected = unpacked(weight).float()
    assert torch.equal(dequantize_mxfp4(weight, torch.float32), expected)
    normal = slice(2, 252)  # bfloat16 has float32's range
    assert torch.equal(dequantize_mxfp4(weight, torch.bfloat16)[normal].float(), expected[normal])


def test_shapes() -> None:
    """Those of the unpacked matrices; bytes are 4.25 bits an element."""
    weight = random_weight(3, 6, 64)
    assert weight.shape == (3, 6, 64)
    assert (weight.num_experts, weight.out_features, weight.in_features) == (3, 6, 64)
    assert weight.num_bytes == 3 * 6 * 64 * 17 // 32
    for expert in range(3):
        whole = dequantize_mxfp4(weight, torch.float32)
        assert torch.equal(dequantize_mxfp4_expert(weight, expert, torch.float32), whole[expert])


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_expert_linear_on_packed_weights(tokens: int, batch_invariant: bool) -> None:
    """Bit-equal to the same GEMM on unpacked weights, and close to float64."""
    weight = random_weight(5, 12, 64)
    plain = unpacked(weight)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(tokens)]).to(torch.int32)
    groups = make_moe_groups(ids, make_lora_segments(torch.full((tokens,), -1, dtype=torch.int32), 1), 5)
    x, bias = torch.randn(tokens, 64), torch.randn(5, 12)
    packed_out, plain_out = torch.empty(tokens, 2, 12), torch.empty(tokens, 2, 12)
    for matrix, out in ((weight, packed_out), (plain.float(), plain_out)):
        expert_linear(x, matrix, groups, out, bias=bias, batch_invariant=batch_invariant)
    assert torch.equal(packed_out, plain_out)
    chosen = ids.to(torch.int64)
    expected = torch.einsum("ti,tkoi->tko", x.double(), plain[chosen]) + bias[chosen]
    assert torch.allclose(packed_out.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (torch.zeros(1, 2, 2, 16), torch.zeros(1, 2, 2, dtype=torch.uint8), "must be uint8"),
        (torch.zeros(1, 2, 2, 16, dtype=torch.uint8), torch.zeros(1, 2, 3, dtype=torch.uint8), "do not fit"),
        (torch.zeros(1, 2, 2, 8, dtype=torch.uint8), torch.zeros(1, 2, 2, dtype=torch.uint8), "do not fit"),
        (torch.zeros(2, 2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8), "do not fit"),
    ],
)
def test_misfits_are_refused(blocks: torch.Tensor, scales: torch.Tensor, message: str) -> None:
    """Shapes and dtypes are named."""
    with pytest.raises(ValueError, match=message):
        Mxfp4Weight(blocks, scales)
