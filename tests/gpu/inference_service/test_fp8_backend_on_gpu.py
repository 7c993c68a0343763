"""FP8 models on a GPU in every form: the CPU's weights and answers, nothing compiled after READY."""

from pathlib import Path

import pytest
import torch

from inference_service.models import CheckpointError, describe_model, load_model
from lorikeet_kernels.dense.fp8_linear import fp8_linear
from lorikeet_kernels.dense.fp8_weight import dequantize_fp8
from lorikeet_kernels.testing import relative_error
from tests.support.fp8_answers import APART, RAGGED, WHOLE, answers, apart, held, load_adapter, write
from tests.support.fp8_checkpoint import FORMS, quantize, write_fp8
from tests.support.runner import Driven, make_backend
from tests.support.tiny_model import CONFIG, make_weights

EVERY_FORM = (*FORMS, "at load")
# Of equal quantised rows. For each 32 columns tensor cores cut the products, and the sum before them, off at
# 2**-13 of the largest one's power of two. Done so in float64, sums of 128 columns are 1.3e-4 from exact ones
# and of 256 (scales of rows) 2.1e-4, 2.4e-4 at most, as an H200's are; with 12 bits 3.2e-4 and 5.1e-4.
# Another's scales make 1.8e-3 in one channel alone, 2.4e-2 in one row of blocks, 128 columns left out 0.7.
SUMS = 2.5 * 2**-13


@pytest.mark.parametrize("fields", [WHOLE, RAGGED], ids=["whole", "ragged"])
@pytest.mark.parametrize("form", EVERY_FORM)
def test_projections_are_the_cpus(tmp_path: Path, form: str, fields: dict[str, object]) -> None:
    """Each matrix stands for the same numbers bit for bit; of equal inputs dense ones make sums as near."""
    path, quantization = write(tmp_path / "model", form, fields)
    description = describe_model(path, quantization)
    models = [
        load_model(description, dtype=torch.float32, device=torch.device(device), num_positions=64)
        for device in ("cpu", "cuda")
    ]
    for layer in range(1 if fields is RAGGED else 0, len(models[0].decoder.layers)):
        here, there = (held(model, layer) for model in models)
        assert here.keys() == there.keys() == {"qkv", "o", "gate_up", "down"}
        for name, weight in here.items():
            assert torch.equal(
                dequantize_fp8(there[name], torch.float32).cpu(), dequantize_fp8(weight, torch.float32)
            )
        for name in ("qkv", "o"):
            x = torch.randn(7, here[name].shape[1])
            got = fp8_linear(x.cuda(), there[name])
            assert relative_error(got.cpu(), fp8_linear(x, here[name])) < SUMS


@pytest.mark.parametrize("fields", [WHOLE, RAGGED], ids=["whole", "ragged"])
@pytest.mark.parametrize("form", EVERY_FORM)
def test_answers_are_near_the_cpu_backends(tmp_path: Path, form: str, fields: dict[str, object]) -> None:
    """Prompts in chunks and decodes, with an adapter and without, in float32 and bf16."""
    path, quantization = write(tmp_path / "model", form, fields)
    results: list[list[Driven]] = []
    for device, dtype in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")):
        backend = make_backend(
            model_dir=str(path), device=device, dtype=dtype, quantization=quantization, max_context_tokens=64
        )
        load_adapter(backend, tmp_path / f"{device}-{dtype}")
        results.append(answers(backend, (-1, 0)))
        if device == "cuda":
            assert backend.compilations() == 0
    for other in results[1:]:
        assert max(apart(results[0], other)) < APART


def test_weights_are_the_checkpoints_bytes_on_the_device(tmp_path: Path) -> None:
    """A NaN that no read on the host looks at is found on the device, and named."""
    made = quantize(make_weights(CONFIG), "block")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    made.tensors[name].view(-1)[5] = float("nan")
    path = write_fp8(tmp_path / "model", made, CONFIG, "block")
    with pytest.raises(CheckpointError, match=rf"with infinities or NaNs: {name} \(F8_E4M3\)"):
        make_backend(model_dir=str(path), device="cuda", dtype="bfloat16", max_context_tokens=64)
