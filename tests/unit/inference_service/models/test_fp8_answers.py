"""What FP8 models' answers may differ by: `APART` lies between rounding and a mistake."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from inference_service.execution.backend import DeviceBackend
from lorikeet_kernels.dense import fp8_linear
from lorikeet_kernels.dense.quantize_rows import ActivationScaling, QuantizedRows, quantize_rows_reference
from lorikeet_kernels.experts import expert_linear
from tests.support.fp8_answers import APART, RAGGED, WHOLE, answers, apart, load_adapter, write
from tests.support.fp8_checkpoint import FORMS
from tests.support.runner import make_backend

BF16_ROUNDING = 2.0**-9


def changed(generator: torch.Generator) -> Callable[[torch.Tensor, ActivationScaling], QuantizedRows]:
    """Quantises rows of which each element was changed as a rounding to bfloat16 changes one."""

    def quantize(x: torch.Tensor, scaling: ActivationScaling) -> QuantizedRows:
        by = BF16_ROUNDING * (2 * torch.rand(x.shape, generator=generator) - 1)
        return quantize_rows_reference(x * (1 + by), scaling)

    return quantize


@pytest.mark.parametrize(
    ("form", "fields"), [*((form, WHOLE) for form in (*FORMS, "at load")), ("block", RAGGED)]
)
def test_roundings_are_near_and_a_missing_adapter_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, fields: dict[str, object]
) -> None:
    """Activations a rounding apart, and the whole model in bfloat16; then the base in the adapter's place."""
    path, quantization = write(tmp_path / "model", form, fields)

    def make(dtype: str) -> DeviceBackend:
        backend = make_backend(
            model_dir=str(path), dtype=dtype, quantization=quantization, max_context_tokens=64
        )
        load_adapter(backend, tmp_path / dtype)
        return backend

    backend = make("float32")
    expected = answers(backend, (-1, 0))
    assert apart(expected, answers(backend, (-1, -1)))[1] > 3 * APART
    rounded = apart(expected, answers(make("bfloat16"), (-1, 0)))
    quantize = changed(torch.Generator().manual_seed(0))
    monkeypatch.setattr(fp8_linear, "quantize_rows_reference", quantize)
    monkeypatch.setattr(expert_linear, "quantize_rows_reference", quantize)
    for found in (rounded, apart(expected, answers(backend, (-1, 0)))):
        assert min(found) > 0.02
        assert max(found) < APART / 1.5
