"""Whatever the sizes, dtype, layout and prefix: the payload's function is the one that was written."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter_manager.application.ingest import payload_writer, weight_reader
from adapter_manager.domain.layout_options import ExpertOrientation, ExpertPacking, LayoutOptions
from lorikeet_contract.manifest import PayloadDtype
from lorikeet_contract.schema import LoraSchema, RowOrder
from tests.support.adapter_directories import config_of, ingest, write_adapter
from tests.support.expert_layouts import LAYOUTS, Weights
from tests.support.lora_schemas import experts

ROOT = "model.layers.0.mlp.experts"
PREFIXES = (
    "base_model.model.",
    "",
    "base_model.model.language_model.",
    "base_model.model.model.language_model.",
)
DTYPES = {
    torch.float32: PayloadDtype.FLOAT32,
    torch.bfloat16: PayloadDtype.BFLOAT16,
    torch.float16: PayloadDtype.FLOAT16,
    torch.float64: PayloadDtype.FLOAT32,
}


def weights(
    num_experts: int, rank: int, in_features: int, out: int, dtype: torch.dtype, seed: int
) -> Weights:
    """Random factors that every dtype here holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    shape_a, shape_b = (num_experts, rank, in_features), (num_experts, out, rank)
    a = torch.randint(-64, 64, shape_a, generator=generator) / 16
    b = torch.randint(-64, 64, shape_b, generator=generator) / 16
    return a.to(dtype), b.to(dtype)


@settings(max_examples=80, deadline=None)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    num_experts=st.integers(1, 5),
    rank=st.integers(1, 11),
    hidden=st.integers(1, 9),
    inner=st.integers(1, 9),
    dtype=st.sampled_from(list(DTYPES)),
    prefix=st.sampled_from(PREFIXES),
    has_adapter_name=st.booleans(),
    is_interleaved=st.booleans(),
    small_windows=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_layout_gives_the_function_that_was_written(
    layout: str,
    num_experts: int,
    rank: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    prefix: str,
    has_adapter_name: bool,
    is_interleaved: bool,
    small_windows: bool,
    seed: int,
) -> None:
    """Deltas are compared in float64; windows of a few elements exercise every cut."""
    gate_up = weights(num_experts, rank, hidden, 2 * inner, dtype, seed)
    down = weights(num_experts, rank, inner, hidden, dtype, seed + 1)
    tensors = LAYOUTS[layout](ROOT, gate_up, down)
    named = {
        _prefixed(k, prefix).replace(".weight", ".default.weight" if has_adapter_name else ".weight"): v
        for k, v in tensors.items()
    }
    row_order = RowOrder.INTERLEAVED if is_interleaved else RowOrder.CONCATENATED
    schema = LoraSchema(1, tuple(experts(0, num_experts, hidden, inner, ROOT, ROOT, row_order=row_order)))
    # Shapes are drawn square, too: say what the layout is, as an uploader would.
    options = LayoutOptions(
        packing=ExpertPacking.EXPERT_MAJOR if layout.endswith("expert-major") else None,
        orientation=ExpertOrientation("exchanged" if layout.endswith("exchanged") else "standard"),
    )
    with tempfile.TemporaryDirectory() as directory:
        config = config_of(rank=rank, alpha=3 * rank)
        path = write_adapter(Path(directory) / "adapter", named, config)
        built, deltas = _ingest_in_windows(path, schema, Path(directory), options, small_windows)
    assert built.manifest.dtype is DTYPES[dtype]
    assert built.report.tensors_used == len(tensors)
    by_slices = layout in ("per-expert", "w123", "stacked-w123")
    for expert in range(num_experts):
        expected = 3.0 * _product(gate_up, expert)
        if by_slices and is_interleaved:
            expected = expected.reshape(2, inner, hidden).transpose(1, 0, 2).reshape(2 * inner, hidden)
        np.testing.assert_array_equal(deltas["layers.0.gate_up", expert], expected)
        np.testing.assert_array_equal(deltas["layers.0.down", expert], 3.0 * _product(down, expert))


def _prefixed(name: str, prefix: str) -> str:
    # Transformers 5 puts the language model inside "model", transformers 4 around it.
    return prefix + (name.removeprefix("model.") if prefix.endswith("model.model.language_model.") else name)


def _product(weights: Weights, expert: int) -> np.ndarray:
    a, b = (w[expert].to(torch.float64).numpy() for w in weights)
    return b @ a


def _ingest_in_windows(path: Path, schema: LoraSchema, tmp: Path, options: LayoutOptions, small: bool):  # noqa: ANN202
    if not small:
        return ingest(path, schema, tmp, options)
    saved = payload_writer.WINDOW_BYTES, payload_writer.BLOCK_BYTES, weight_reader.WINDOW_BYTES
    payload_writer.WINDOW_BYTES, payload_writer.BLOCK_BYTES, weight_reader.WINDOW_BYTES = 24, 96, 24
    try:
        return ingest(path, schema, tmp, options)
    finally:
        payload_writer.WINDOW_BYTES, payload_writer.BLOCK_BYTES, weight_reader.WINDOW_BYTES = saved
