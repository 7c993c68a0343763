"""FP8 models on a GPU: the CPU backend's answers in every form, nothing compiled after READY."""

from pathlib import Path

import pytest

from inference_service.execution.backend import DeviceBackend
from inference_service.models import CheckpointError
from lorikeet_contract.manifest import PayloadDtype
from lorikeet_contract.schema import LoraSchema
from tests.support.fp8_checkpoint import FORMS, quantize, write_fp8
from tests.support.payloads import random_site, write_payload
from tests.support.runner import GREEDY, Driven, DrivenRequest, drive, make_backend
from tests.support.tiny_model import CONFIG, make_weights, write_model

PROMPT = (3, 17, 17, 0, 39, 8, 21, 2, 5, 30, 11, 12, 13, 14, 15, 16, 18, 19)
WHOLE = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
RAGGED = {"mlp_only_layers": [0], "num_hidden_layers": 3}
SAMPLING = type(GREEDY)(max_tokens=8, temperature=0.0, prompt_logprobs=40)


def load_adapter(backend: DeviceBackend, path: Path) -> None:
    """Weights at every site, in slot 0."""
    schema = LoraSchema.from_json(backend.info.lora_schema)
    sites = [random_site(s, 4, scales=(0.3,), seed=i) for i, s in enumerate(schema.sites)]
    manifest = write_payload(path, schema, backend.info.base_digest, sites, PayloadDtype.FLOAT32)
    backend.host_pool.read(manifest, str(path))
    assert backend.arena.begin_copy(manifest.digest, 0)
    while 0 not in backend.arena.poll():
        pass


def write(path: Path, form: str, fields: dict[str, object]) -> tuple[Path, str | None]:
    """A model directory, and what to ask of a load."""
    config = CONFIG | fields
    if form == "at load":
        return write_model(path, **fields), "fp8"
    return write_fp8(path, quantize(make_weights(config), form), config, form), None


@pytest.mark.parametrize("fields", [WHOLE, RAGGED], ids=["whole", "ragged"])
@pytest.mark.parametrize("form", [*FORMS, "at load"])
def test_equals_the_cpu_backend(tmp_path: Path, form: str, fields: dict[str, object]) -> None:
    """Prompts in chunks and decodes, with an adapter and without; bf16 stays near."""
    path, quantization = write(tmp_path / "model", form, fields)
    results: list[list[Driven]] = []
    for device, dtype in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")):
        backend = make_backend(
            model_dir=str(path), device=device, dtype=dtype, quantization=quantization, max_context_tokens=64
        )
        load_adapter(backend, tmp_path / f"{device}-{dtype}")
        requests = [DrivenRequest(PROMPT, slot, SAMPLING) for slot in (-1, 0)]
        results.append(drive(backend, requests, num_tokens=8, chunk=7))
        if device == "cuda":
            assert backend.compilations() == 0
    for other, median in ((1, 5e-3), (2, 0.2)):
        found = sorted(
            abs(a.logprob - b.logprob)
            for x, y in zip(results[0], results[other], strict=True)
            for a, b in zip(x.prompt_logprobs, y.prompt_logprobs, strict=True)
        )
        assert found[len(found) // 2] < median


def test_weights_are_the_checkpoints_bytes_on_the_device(tmp_path: Path) -> None:
    """A NaN that no read on the host looks at is found on the device, and named."""
    made = quantize(make_weights(CONFIG), "block")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    made.tensors[name].view(-1)[5] = float("nan")
    path = write_fp8(tmp_path / "model", made, CONFIG, "block")
    with pytest.raises(CheckpointError, match=rf"with infinities or NaNs: {name} \(F8_E4M3\)"):
        make_backend(model_dir=str(path), device="cuda", dtype="bfloat16", max_context_tokens=64)
