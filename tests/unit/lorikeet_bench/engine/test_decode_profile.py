"""What a profile makes of kernels: times, gaps, and the part of the model that each is of."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lorikeet_kernels
from lorikeet_bench.engine.decode_profile import DecodeProfile, OpTime, parts_in_order
from lorikeet_bench.engine.kernel_parts import part_of
from lorikeet_bench.engine.profile_watch import summarize_spans
from lorikeet_bench.load.model_part import ModelPart
from lorikeet_bench.load.step_floor import BYTES_PER_S, DecodeStepBytes

KERNELS = Path(lorikeet_kernels.__file__).parent
NVJET = "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"
# What a room's kernels may be of.
ROOMS = {
    "attention": {ModelPart.ATTENTION, ModelPart.NORMS},
    "dense": {ModelPart.PROJECTIONS, ModelPart.NORMS, ModelPart.QUANTIZED, ModelPart.EXPERTS},
    "experts": {ModelPart.EXPERTS, ModelPart.ROUTING, ModelPart.PROJECTIONS},
    "lora": {ModelPart.ADAPTERS, ModelPart.PROJECTIONS},  # a projection may make its delta, too
    "sampling": {ModelPart.SAMPLING},
}


def launched_kernels() -> Iterator[tuple[str, str]]:
    """(room, name) of each function that a launch function of the library subscripts with a grid."""
    for path in sorted(KERNELS.glob("*/*.py")):
        tree = ast.parse(path.read_text())
        jitted = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        }
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.name.endswith("_kernel")
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = ast.unparse(node.func.value)
                if name in jitted | imported:
                    yield path.parent.name, name


def test_kernels_of_two_streams_are_counted_once_where_they_overlap() -> None:
    """[0, 10] and [4, 6] on another stream, idle to 13, [13, 20]; over two steps."""
    spans = [(0.0, 10.0, "a"), (4.0, 6.0, "b"), (13.0, 20.0, "a")]
    ops, gaps, busy_us, gap_us = summarize_spans(spans, 2)
    other = ModelPart.OTHER
    assert ops == (OpTime("a", other, 1.0, 8.5), OpTime("b", other, 0.5, 1.0))
    assert (busy_us, gap_us) == (8.5, 1.5)
    assert [(gap.after, gap.before, gap.us) for gap in gaps] == [("a", "a", 1.5)]


def test_every_kernel_of_the_library_is_of_its_rooms_parts() -> None:
    """None is "other"."""
    found = set(launched_kernels())
    assert len(found) > 40
    assert {room for room, _ in found} == set(ROOMS)
    wrong = {(room, name, part_of(name)) for room, name in found if part_of(name) not in ROOMS[room]}
    assert not wrong


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("_mxfp4_decode_kernel", ModelPart.EXPERTS),
        ("_count_kernel", ModelPart.ADAPTERS),
        ("_register_segments_kernel", ModelPart.ADAPTERS),
        ("_decode_kernel", ModelPart.ATTENTION),
        ("_attention_inputs_kernel", ModelPart.NORMS),
        ("_few_rows_products_kernel", ModelPart.PROJECTIONS),
        ("_few_heads_kernel", ModelPart.PROJECTIONS),
        ("_few_heads_lora_kernel", ModelPart.PROJECTIONS),
        ("_fp8_gemm_lora_kernel", ModelPart.EXPERTS),
        ("_fp8_ranged_down_kernel", ModelPart.EXPERTS),
        ("_router_logits_kernel", ModelPart.PROJECTIONS),
        ("_dense_fp8_kernel", ModelPart.PROJECTIONS),
        (NVJET, ModelPart.PROJECTIONS),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", ModelPart.PROJECTIONS),
        ("void cublasLt::splitKreduce_kernel<32, 16>", ModelPart.PROJECTIONS),
        ("_route_kernel", ModelPart.ROUTING),
        ("_rms_norm_kernel", ModelPart.NORMS),
        ("_largest_kernel", ModelPart.SAMPLING),
        ("Memcpy DtoH (Device -> Pinned)", ModelPart.COPIES),
        ("void at::native::vectorized_gather_kernel<16, long>", ModelPart.COPIES),
        ("something else", ModelPart.OTHER),
    ],
)
def test_a_kernel_is_of_a_part(name: str, part: ModelPart) -> None:
    """By names that the kernels have."""
    assert part_of(name) is part


def test_the_head_is_the_last_product_before_the_sampling() -> None:
    """Whatever kernel computes it; the next step's products are projections again."""
    layer = [NVJET, "_attention_inputs_kernel", "_decode_kernel", NVJET, "_rms_norm_kernel"]
    step = [
        "_pending_tokens_kernel",
        "_rms_norm_kernel",
        *layer,
        NVJET,
        "splitKreduce_kernel",
        "_largest_kernel",
    ]
    parts = parts_in_order([*step, *step])
    assert parts[:10] == parts[10:]
    assert [part for part in parts[:10] if part in {ModelPart.PROJECTIONS, ModelPart.LM_HEAD}] == [
        *(ModelPart.PROJECTIONS, ModelPart.PROJECTIONS),
        *(ModelPart.LM_HEAD, ModelPart.LM_HEAD),
    ]


def test_parts_stand_beside_their_floors() -> None:
    """By time; without one where bytes are left out; one that was not seen at the end."""
    ops = (
        OpTime("x", ModelPart.EXPERTS, 1.0, 30.0),
        OpTime("y", ModelPart.NORMS, 1.0, 40.0),
        OpTime("z", ModelPart.EXPERTS, 1.0, 20.0),
    )
    profile = DecodeProfile("gpu", 1, 1, 0, 0, 0, 0, ops)
    floor = DecodeStepBytes(0.0, 10e-6 * BYTES_PER_S, 5e-6 * BYTES_PER_S, 0.0, 0.0)
    parts = profile.beside(floor)
    assert [(part.part, part.us) for part in parts] == [
        (ModelPart.EXPERTS, 50.0),
        (ModelPart.NORMS, 40.0),
        (ModelPart.LM_HEAD, 0.0),
    ]
    assert [part.floor_us for part in parts] == [pytest.approx(10.0), None, pytest.approx(5.0)]
