"""Router logits of few rows on a GPU, as parts that routing adds up.

    parts[s, t] = W[:, columns of part s] x[t, columns of part s]
    logits = round(parts[0] + parts[1] + ... + bias)

Shapes: x [T, H], weight [E, H], bias [E], parts [S, T, E] float32. The sum is in that order, and rounds once
to x's dtype, as the projection does. A row's bits depend neither on the other rows nor on their number.

The weight is small and the sums are long: what takes time is the way there and back, and a second launch that
adds up splits. Here a program takes 32 experts and one part's columns, and loads its weights before the
launch before is over; routing, which waits for the logits anyway, adds up.

Floor: the weight's bytes at 4.3 TB/s (gpt-oss-20b: 0.04 us). Measured on an H200, 1 to 64 rows there:
norm, router and routing take 3.5 to 3.9 us, with cuBLAS's logits 7.5 to 8.3.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lorikeet_kernels.dense.few_rows_linear import takes
from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.tiling.router_tiles import MAX_EXPERTS, MAX_ROWS, RouterTiles, select_router

BLOCK_EXPERTS = 32
BLOCK_ROWS = 16  # or twice as many. Never 64: from there on other instructions add up in another order


@dataclass(frozen=True, slots=True)
class LogitParts:
    """Logits [T, E] not added up yet: parts [S, T, E] float32, a bias [E], and what their sum rounds to."""

    parts: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.parts.device

    def whole(self) -> torch.Tensor:
        """The logits, a new tensor."""
        logits = torch.zeros_like(self.parts[0])
        for part in self.parts:
            logits += part
        if self.bias is not None:
            logits += self.bias.float()
        return logits.to(self.dtype)


def router_logits_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: RouterTiles
) -> LogitParts:
    """See `router_logits`."""
    columns = zip(
        x.float().split(tiles.columns, dim=1), weight.float().split(tiles.columns, dim=1), strict=True
    )
    return LogitParts(torch.stack([part @ matrix.T for part, matrix in columns]), bias, x.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _router_logits_kernel(
    parts_ptr, x_ptr, weight_ptr, num_rows,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    e = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = split * COLUMNS + tl.arange(0, COLUMNS)
    is_column, is_row = k < HIDDEN, row < num_rows
    weight_at = weight_ptr + e[:, None] * HIDDEN + k[None, :]
    weight = tl.load(weight_at, mask=(e < EXPERTS)[:, None] & is_column[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x_at = x_ptr + row[:, None] * HIDDEN + k[None, :]
    x = tl.load(x_at, mask=is_row[:, None] & is_column[None, :], other=0.0)
    y = tl.dot(x, tl.trans(weight), input_precision="ieee")
    at = parts_ptr + (split * num_rows + row)[:, None] * EXPERTS + e[None, :]
    tl.store(at, y, mask=is_row[:, None] & (e < EXPERTS)[None, :])


def router_logits(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: RouterTiles
) -> LogitParts:
    """The logits of x [T, H], in parts; see this module's docstring."""
    num_rows, (num_experts, hidden) = x.shape[0], weight.shape
    if x.shape[1] != hidden or x.dtype != weight.dtype or num_rows > MAX_ROWS or num_experts > MAX_EXPERTS:
        raise ValueError(
            f"router_logits: x {x.dtype} {tuple(x.shape)} for {weight.dtype} {tuple(weight.shape)}; at most "
            f"{MAX_ROWS} rows and {MAX_EXPERTS} experts"
        )
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("router_logits: x and weight must be contiguous")
    splits = triton.cdiv(hidden, tiles.columns)
    parts = torch.empty((splits, num_rows, num_experts), dtype=torch.float32, device=x.device)
    pdl = x.device.type == "cuda"
    if num_rows > 0:
        block_m = BLOCK_ROWS if num_rows <= BLOCK_ROWS else 2 * BLOCK_ROWS
        grid = (splits, triton.cdiv(num_experts, BLOCK_EXPERTS), triton.cdiv(num_rows, block_m))
        _router_logits_kernel[grid](
            parts, x, weight, num_rows,
            EXPERTS=num_experts, HIDDEN=hidden, BLOCK_M=block_m, BLOCK_N=BLOCK_EXPERTS, COLUMNS=tiles.columns,
            PDL=pdl, num_warps=tiles.num_warps, **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return LogitParts(parts, bias, x.dtype)


def router_in_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> LogitParts | None:
    """The logits where parts were measured to be the faster way, None where the projection is."""
    if x.device.type == "cpu" or not takes(x, weight):
        return None
    tiles = select_router(x.shape[0], *weight.shape, device_name(x))
    return None if tiles is None else router_logits(x, weight, bias, tiles)
