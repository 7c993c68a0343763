"""MXFP4 expert matrices re-laid for the device, once at load: the same bits in the order kernels read them.

A matrix is cut into tiles of 16 rows by 64 columns. Of a tile, MMA lane 4 g + t (g < 8, t < 4) multiplies
rows g and g + 8 (half h) and, of each 32-column block kb, the columns 16 s + 8 u + 2 t + b with s, u, b < 2.
Its four words, one for each (kb, h), lie side by side: one 16-byte load fills the MMA's registers for the
whole tile.

    words[e, tile, chunk, 4 (4 g + t) + 2 kb + h]: value (s, u, b) of the word in half b, at place 2 s + u
    scales[e, tile, chunk, g]: byte 2 kb + h is the exponent of row (h, g), column block kb

The four places of a half are chosen so that a mask and a shift leave a value's bits where bfloat16 has sign,
lowest exponent bits and highest mantissa bit:

    place 0: bits 15, 8:6     place 1: 12, 5:3     place 2: 9, 2:0     place 3: sign 14, then 13, 11, 10

Read as bfloat16 that is the value times 2 ** -126 (subnormals included), so exponents are stored with the 126
added: their product with the value is exact.
"""

from dataclasses import dataclass

import torch

from lorikeet_kernels.dense.row_order import RowOrder, check_row_order, slice_columns
from lorikeet_kernels.experts.mxfp4 import Mxfp4Weight

TILE_ROWS = 16
CHUNK = 64
"""Columns of a tile."""
LARGEST_EXPONENT = 128
"""Of a scale, as stored plus 126: a larger one has no bfloat16. `exponent_shift` makes room."""
_ADDED = 126
_PLACES = ((15, (8, 7, 6)), (12, (5, 4, 3)), (9, (2, 1, 0)), (14, (13, 11, 10)))


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4DeviceWeight:
    """Re-laid matrices [E, out, in]; see this module's docstring.

    With `pairing`, the matrix's row order, a tile holds 8 rows of the gate (h = 0) and the 8 of up that
    belong to them (h = 1); else 16 rows in a row. Every value is to be multiplied by 2 ** exponent_shift.
    """

    words: torch.Tensor  # [E, tiles, chunks, 128] int32
    scales: torch.Tensor  # [E, tiles, chunks, 8] int32
    out_features: int
    in_features: int
    pairing: RowOrder | None
    exponent_shift: int

    @property
    def num_experts(self) -> int:
        """E."""
        return self.words.shape[0]

    @property
    def num_tiles(self) -> int:
        """Tiles of 16 rows of a matrix; the last may hold rows of zeros."""
        return self.words.shape[1]

    @property
    def num_chunks(self) -> int:
        """Chunks of 64 columns of a matrix; the last may hold columns of zeros."""
        return self.words.shape[2]

    @property
    def shape(self) -> torch.Size:
        """[E, out, in]."""
        return torch.Size((self.num_experts, self.out_features, self.in_features))

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return 4 * (self.words.numel() + self.scales.numel())


def lay_out_mxfp4(weight: Mxfp4Weight, *, pairing: RowOrder | None = None) -> Mxfp4DeviceWeight:
    """Re-lay `weight`, on its own device; an expert at a time, so little beside the result is held.

    `pairing` names the row order of a gate_up matrix and is None for any other.

    Raises:
        ValueError: the scales of a matrix stack span more than bfloat16's exponents can hold.
    """
    if pairing is not None:
        check_row_order(pairing)
    num_experts, out_features, in_features = weight.shape
    num_rows = TILE_ROWS // 2 if pairing else TILE_ROWS
    num_tiles = -(-(out_features // 2 if pairing else out_features) // num_rows)
    num_chunks = -(-in_features // CHUNK)
    shift = _exponent_shift(weight)
    device = weight.blocks.device
    words = torch.empty((num_experts, num_tiles, num_chunks, 128), dtype=torch.int32, device=device)
    scales = torch.empty((num_experts, num_tiles, num_chunks, 8), dtype=torch.int32, device=device)
    tables = _place_tables().to(device)
    for expert in range(num_experts):
        blocks = weight.blocks[expert]
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
        words[expert] = _words(_tiles(codes, num_tiles, num_chunks * CHUNK, pairing), tables)
        exponents = weight.scales[expert].to(torch.int32) + (_ADDED - shift)
        # a block of zeros may have any scale, also one below the range
        exponents = exponents.clamp(min=0)
        scales[expert] = _scale_words(_tiles(exponents, num_tiles, num_chunks * 2, pairing))
    return Mxfp4DeviceWeight(words, scales, out_features, in_features, pairing, shift)


def _exponent_shift(weight: Mxfp4Weight) -> int:
    nonzero = ((weight.blocks & 0x77) != 0).any(dim=-1)  # -0 is zero too
    used = weight.scales.to(torch.int32)
    if not bool(nonzero.any()):
        return 0
    largest = int(torch.where(nonzero, used, 0).amax())
    smallest = int(torch.where(nonzero, used, 255).amin())
    shift = max(0, largest - LARGEST_EXPONENT)
    if smallest < shift:  # its products would be less than bfloat16's smallest
        raise ValueError(
            f"MXFP4 scales from 2**{smallest - 127} to 2**{largest - 127} span too much for bf16"
        )
    return shift


def _tiles(rows: torch.Tensor, num_tiles: int, width: int, pairing: RowOrder | None) -> torch.Tensor:
    """[out, n] to [tiles, 2, 8, width], zeros where the matrix ends."""
    if pairing is None:
        padded = rows.new_zeros((num_tiles * TILE_ROWS, width))
        padded[: rows.shape[0], : rows.shape[1]] = rows
        return padded.view(num_tiles, 2, TILE_ROWS // 2, width)
    padded = rows.new_zeros((2, num_tiles * TILE_ROWS // 2, width))
    for index in range(2):
        part = rows[slice_columns(pairing, rows.shape[0], index)]
        padded[index, : part.shape[0], : part.shape[1]] = part
    return padded.view(2, num_tiles, TILE_ROWS // 2, width).transpose(0, 1)


def _place_tables() -> torch.Tensor:
    """[4, 16] int32: a code's bits at each place of a half word."""
    rows = [
        [
            (code >> 3 & 1) << sign | sum((code >> (2 - i) & 1) << bit for i, bit in enumerate(bits))
            for code in range(16)
        ]
        for sign, bits in _PLACES
    ]
    return torch.tensor(rows, dtype=torch.int32)


def _words(codes: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """[tiles, h, g, columns] codes to [tiles, chunks, 128] words."""
    num_tiles, _, _, width = codes.shape
    # columns are (chunk, kb, s, u, t, b); words are (chunk, g, t, kb, h)
    parts = codes.reshape(num_tiles, 2, 8, width // CHUNK, 2, 2, 2, 4, 2).permute(5, 6, 8, 0, 3, 2, 7, 4, 1)
    words = torch.zeros(parts.shape[3:], dtype=torch.int32, device=codes.device)
    for s in range(2):
        for u in range(2):
            for b in range(2):
                words |= tables[2 * s + u][parts[s, u, b].to(torch.int64)] << (16 * b)
    return words.reshape(num_tiles, width // CHUNK, 128)


def _scale_words(exponents: torch.Tensor) -> torch.Tensor:
    """[tiles, h, g, blocks of 32] to [tiles, chunks, 8] words."""
    num_tiles, _, _, width = exponents.shape
    parts = exponents.reshape(num_tiles, 2, 8, width // 2, 2).permute(4, 1, 0, 3, 2)  # kb, h, tile, chunk, g
    words = torch.zeros(parts.shape[2:], dtype=torch.int32, device=exponents.device)
    for kb in range(2):
        for h in range(2):
            words |= parts[kb, h] << (8 * (2 * kb + h))
    return words
