"""Grouped GEMM over e4m3 experts for many tokens an expert: some warps load, others multiply (Gluon).

    y[p] = W[expert] x[row(p)] + bias[expert], then what follows it; see fp8_gemm

A program stays on its multiprocessor and takes one item after the other: up to `block_rows` pairs of one
expert and several tiles of 128 of the matrix's rows. One warpgroup fills a ring with steps of 128 columns,
weights by the copy engine, the pairs' rows and down's scales by asynchronous copies, and runs ahead into the
next tile and item. Rows of few columns come once an item and stay for all its tiles, and the ring holds the
rest. The other warpgroups have 64 of the pairs each: a step's MMAs leave a sum, which is multiplied by its
scales and added to the accumulator while the tensor cores work for another warpgroup. So an expert's weights
come once for all its pairs, and neither an item's beginning nor its end leaves the memory idle.

Whole blocks of 128 x 128 only, and with an activation gate's rows above up's.
"""

# A Gluon kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# Gluon's tuples grow by +.
# ruff: noqa: RUF005

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.dense.gated_activation import GatedActivation
from lorikeet_kernels.dense.quantize_rows import QuantizedRows
from lorikeet_kernels.experts.expert_blocks import ExpertBlocks
from lorikeet_kernels.experts.fp8_warps import ROWS, SCALES, STEP, TILE, load, multiply
from lorikeet_kernels.launch.grid_dependency import launch_next_grid, wait_for_grid
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles

STAYING_COLUMNS = 256
"""Columns up to which the pairs' rows stay in shared memory for an item; those of the next come meanwhile."""
_STEPS = 32  # of an item, at least, as far as the matrix has so many: an item's beginning takes about 1.5 us
_THREAD_REGISTERS = {2: 168, 3: 128}  # by warpgroups that multiply: of 65,536, for one warpgroup more


@gluon.jit(do_not_specialize=["num_items"], do_not_specialize_on_alignment=["num_items"])
def _fp8_specialized_kernel(
    weight_desc, out_ptr, x_ptr, x_scale_ptr, scale_ptr, bias_ptr, routed_ptr, delta_ptr, order_ptr,
    blocks_ptr, num_items, alpha, limit, up_offset,
    IN: gl.constexpr, OUT: gl.constexpr, X_DIV: gl.constexpr, ACTIVATE: gl.constexpr,
    HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_ROUTED: gl.constexpr, HAS_DELTA: gl.constexpr,
    RANGES: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, STAYS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The launch's own warpgroup loads, GROUPS others multiply."""
    if PDL:
        wait_for_grid()
        launch_next_grid()
    RING: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    E4M3: gl.constexpr = x_ptr.dtype.element_ty
    X_STEPS: gl.constexpr = 2 * (IN // STEP) if STAYS else STAGES
    x_ring = gl.allocate_shared_memory(E4M3, [X_STEPS * GROUPS, ROWS, STEP], RING)
    weight_ring = gl.allocate_shared_memory(E4M3, [STAGES] + weight_desc.block_shape, weight_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stay = ()
    for slot in gl.static_range(STAGES):
        # the copy engine's bytes, and each loading thread's copies
        mbarrier.init(full.index(slot), count=1 + 128)
        mbarrier.init(empty.index(slot), count=GROUPS)
    if STAYS:
        x_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        x_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for half in gl.static_range(2):
            mbarrier.init(x_full.index(half), count=128)
            mbarrier.init(x_empty.index(half), count=GROUPS)
        stay = (x_full, x_empty)
    fence_async_shared()  # the copy engine's proxy must see the barriers before its first bytes arrive
    ring = (weight_ring, full, empty, x_ring)
    if not ACTIVATE:
        ring = ring + (gl.allocate_shared_memory(gl.float32, [STAGES, SCALES], LINE),)
    work = (order_ptr, (blocks_ptr, num_items))
    scales = (x_scale_ptr, scale_ptr)
    finish = (out_ptr, bias_ptr, routed_ptr, delta_ptr, alpha, limit, up_offset)
    shared = (ring, stay, work, scales, finish)
    # Registers of a multiprocessor: 512 threads have 128 each, 384 have 168; the loading warps keep 56 or 72.
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (load, (
                    ring, stay, work, scales, weight_desc, x_ptr, IN, OUT, X_DIV, ACTIVATE, RANGES, GROUPS,
                    STAYS,
                )),
                (multiply, (
                    0, shared, IN, OUT, X_DIV, ACTIVATE, HAS_LIMIT, HAS_BIAS, HAS_ROUTED, HAS_DELTA,
                    RANGES, GROUPS, STAYS,
                )),
                (multiply, (
                    1, shared, IN, OUT, X_DIV, ACTIVATE, HAS_LIMIT, HAS_BIAS, HAS_ROUTED, HAS_DELTA,
                    RANGES, GROUPS, STAYS,
                )),
                (multiply, (
                    2, shared, IN, OUT, X_DIV, ACTIVATE, HAS_LIMIT, HAS_BIAS, HAS_ROUTED, HAS_DELTA,
                    RANGES, GROUPS, STAYS,
                )),
            ],
            [4, 4, 4], [152, 152, 152],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 2)
        gl.warp_specialize(
            [
                (load, (
                    ring, stay, work, scales, weight_desc, x_ptr, IN, OUT, X_DIV, ACTIVATE, RANGES, GROUPS,
                    STAYS,
                )),
                (multiply, (
                    0, shared, IN, OUT, X_DIV, ACTIVATE, HAS_LIMIT, HAS_BIAS, HAS_ROUTED, HAS_DELTA,
                    RANGES, GROUPS, STAYS,
                )),
                (multiply, (
                    1, shared, IN, OUT, X_DIV, ACTIVATE, HAS_LIMIT, HAS_BIAS, HAS_ROUTED, HAS_DELTA,
                    RANGES, GROUPS, STAYS,
                )),
            ],
            [4, 4], [216, 216],
        )  # fmt: skip


def launch_specialized(
    x: QuantizedRows,
    weight: Fp8Weight,
    blocks: ExpertBlocks,
    out: torch.Tensor,
    tiles: ExpertTiles,
    bias: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    activation: GatedActivation | None,
    delta: torch.Tensor | None,
) -> torch.Tensor:
    """See `fp8_gemm`, which has checked what it is given."""
    constants = activation or GatedActivation()
    limit, unused = constants.limit, x.scales
    num_experts, out_features, in_features = weight.shape
    num_tiles, num_steps = out_features // TILE.value, in_features // STEP.value
    ranges = triton.cdiv(num_tiles, max(1, _STEPS // num_steps))
    groups = tiles.block_rows // ROWS.value
    # a tile's rows of gate and of up in one box
    halves = 2 if activation else 1
    rows = weight.values.view(num_experts * halves, out_features // halves, in_features)
    box = [halves, TILE.value // halves, STEP.value]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3)
    num_items = blocks.capacity * ranges
    num_processors = torch.cuda.get_device_properties(out.device).multi_processor_count
    _fp8_specialized_kernel[(min(num_items, num_processors),)](
        TensorDescriptor.from_tensor(rows, box, layout), out, x.values, x.scales, weight.scales,
        unused if bias is None else bias, unused if topk_weights is None else topk_weights,
        unused if delta is None else delta, blocks.order, blocks.blocks, num_items,
        constants.alpha, 0.0 if limit is None else limit, constants.up_offset,
        IN=in_features, OUT=out_features, X_DIV=blocks.top_k if x.values.dim() == 2 else 1,
        ACTIVATE=activation is not None, HAS_LIMIT=limit is not None, HAS_BIAS=bias is not None,
        HAS_ROUTED=topk_weights is not None, HAS_DELTA=delta is not None, RANGES=ranges,
        GROUPS=groups, STAGES=tiles.stages, STAYS=in_features <= STAYING_COLUMNS, PDL=True,
        num_warps=4, maxnreg=_THREAD_REGISTERS[groups], launch_pdl=True,
    )  # fmt: skip
    return out
