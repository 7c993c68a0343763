"""The device's order of MXFP4 matrices: bit for bit what was released, read as the kernels read it."""

import pytest
import torch

from lorikeet_kernels.dense.row_order import RowOrder, slice_columns
from lorikeet_kernels.experts.mxfp4 import Mxfp4Weight, dequantize_mxfp4
from lorikeet_kernels.experts.mxfp4_layout import Mxfp4DeviceWeight, lay_out_mxfp4


def random_weight(experts: int, rows: int, columns: int, low: int = 100, high: int = 129) -> Mxfp4Weight:
    """Every code is equally likely, scales lie in [2**(low - 127), 2**(high - 127))."""
    generator = torch.Generator().manual_seed(rows + columns)
    shape = (experts, rows, columns // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return Mxfp4Weight(blocks, torch.randint(low, high, shape, dtype=torch.uint8, generator=generator))


def bf16_of_bits(bits: torch.Tensor) -> torch.Tensor:
    """The float32 value of bfloat16 patterns in the low 16 bits."""
    return (bits.to(torch.int64) << 16).to(torch.int32).view(torch.float32)


def word_values(words: torch.Tensor) -> torch.Tensor:
    """[..., 8] the eight bfloat16 values of a word by the kernels' masks and shifts, in (s, u, b) order."""
    word = words.to(torch.int64) & 0xFFFFFFFF
    mask = 0x81C081C0
    last = ((word << 1) & 0x80008000) | ((word >> 5) & 0x01000100) | ((word >> 4) & 0x00C000C0)
    places = (word & mask, (word << 3) & mask, (word << 6) & mask, last)
    return torch.stack([bf16_of_bits(half) for p in places for half in (p & 0xFFFF, p >> 16)], dim=-1)


def as_the_mma_reads(weight: Mxfp4DeviceWeight) -> torch.Tensor:
    """[E, tiles, 16, columns] float32: each lane's registers put where the MMA's operand layout has them."""
    e, tiles, chunks, _ = weight.words.shape
    values = word_values(weight.words).view(e, tiles, chunks, 8, 4, 2, 2, 2, 2, 2)  # g t kb h s u b
    exponents = torch.stack([weight.scales >> (8 * i) & 255 for i in range(4)], dim=-1)
    factors = bf16_of_bits(exponents << 7).view(e, tiles, chunks, 8, 1, 2, 2, 1, 1, 1)
    product = (values.to(torch.bfloat16) * factors.to(torch.bfloat16)).float()
    # rows h g, columns chunk kb s u t b
    matrix = product.permute(0, 1, 6, 3, 2, 5, 7, 8, 4, 9).reshape(e, tiles, 16, chunks * 64)
    return torch.ldexp(matrix, torch.tensor(weight.exponent_shift))


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (48, 192), (40, 96), (7, 32)])
def test_plain_matrices_come_back_exactly(rows: int, columns: int) -> None:
    """Whole tiles and ragged ones; what is beyond the matrix is zero."""
    weight = random_weight(3, rows, columns)
    matrix = as_the_mma_reads(lay_out_mxfp4(weight)).flatten(1, 2)
    assert torch.equal(matrix[:, :rows, :columns], dequantize_mxfp4(weight, torch.float32))
    assert not matrix[:, rows:].any()
    assert not matrix[:, :, columns:].any()


@pytest.mark.parametrize("row_order", ["interleaved", "concatenated"])
@pytest.mark.parametrize(("half", "columns"), [(8, 64), (24, 128), (20, 96)])
def test_pairs_of_gate_and_up_share_a_lane(half: int, columns: int, row_order: RowOrder) -> None:
    """Rows g and g + 8 of a tile are a gate row and its up row, in both row orders."""
    weight = random_weight(2, 2 * half, columns)
    laid = lay_out_mxfp4(weight, pairing=row_order)
    assert laid.shape == weight.shape
    matrix = as_the_mma_reads(laid)
    plain = dequantize_mxfp4(weight, torch.float32)
    for index in range(2):
        got = matrix[:, :, 8 * index : 8 * index + 8].flatten(1, 2)[:, :half, :columns]
        assert torch.equal(got, plain[:, slice_columns(row_order, 2 * half, index)])


def test_every_code_at_every_scale_is_exact() -> None:
    """All 16 codes times all exponents from 2**-126 to 2."""
    blocks = torch.arange(16, dtype=torch.uint8).repeat(2).view(2, 16)
    blocks = (blocks[0] | blocks[1] << 4).expand(1, 128, 1, 16).contiguous()
    weight = Mxfp4Weight(blocks, torch.arange(1, 129, dtype=torch.uint8).view(1, 128, 1))
    matrix = as_the_mma_reads(lay_out_mxfp4(weight)).flatten(1, 2)[:, :, :32]
    assert torch.equal(matrix, dequantize_mxfp4(weight, torch.float32))


def test_large_scales_shift_all_and_blocks_of_zeros_do_not_count() -> None:
    """2**20 fits after a shift; a block of zeros may have any scale."""
    weight = random_weight(1, 16, 64, 130, 148)
    weight.blocks[0, 3, 1] = 0x80  # zeros and minus zeros
    weight.scales[0, 3, 1] = 0
    laid = lay_out_mxfp4(weight)
    assert laid.exponent_shift > 0
    assert torch.equal(as_the_mma_reads(laid).flatten(1, 2), dequantize_mxfp4(weight, torch.float32))


def test_a_span_beyond_bfloat16_is_refused() -> None:
    """Scales 2**-126 and 2**127 in one stack."""
    weight = random_weight(1, 16, 64, 1, 2)
    weight.scales[0, 0, 0] = 254
    with pytest.raises(ValueError, match="span too much"):
        lay_out_mxfp4(weight)


def test_bytes_are_those_of_the_released_form() -> None:
    """No padding where sizes are multiples of 16 and 64."""
    weight = random_weight(2, 32, 128)
    assert lay_out_mxfp4(weight).num_bytes == weight.num_bytes
