"""How memory is shared out, and when start-up is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import structlog
import torch

from inference_service.execution import backend
from inference_service.execution.backend import load_backend
from inference_service.execution.config import BackendConfig
from inference_service.execution.memory import MemoryBudgetError, MemoryPlan, plan_memory
from inference_service.models import ModelConfigError, ModelDescription, describe_model, parameter_bytes
from tests.support.tiny_model import CONFIG, make_weights, write_model

CPU = torch.device("cpu")
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, kv heads, head_dim, block tokens, float32


@pytest.fixture
def description(tmp_path: Path) -> ModelDescription:
    """The tiny model, no weights."""
    return describe_model(write_model(tmp_path, {}))


def plan(description: ModelDescription, free: int = 1 << 30, **settings: int) -> MemoryPlan:
    """A plan with a 1 MiB arena."""
    config = replace(BackendConfig(model_dir="", arena_bytes=1 << 20), **settings)
    return plan_memory(config, description, torch.float32, CPU, free)


def test_parameters_are_counted(description: ModelDescription) -> None:
    """All but the norms."""
    matrices = sum(w.size for w in make_weights(CONFIG).values() if w.ndim == 2)
    assert parameter_bytes(description.spec, torch.float32) == 4 * matrices
    assert parameter_bytes(description.spec, torch.bfloat16) == 2 * matrices


def test_given_sizes_are_taken(description: ModelDescription) -> None:
    """num_blocks as it is; kv_cache_bytes in whole blocks."""
    assert plan(description, num_blocks=9).num_blocks == 9
    assert plan(description, kv_cache_bytes=10 * BLOCK_BYTES + 5).num_blocks == 10


def test_derived_cache_holds_every_running_request(description: ModelDescription) -> None:
    """But no more, and no more than there is room for."""
    assert plan(description, max_running_requests=3).num_blocks == 3 * 256 // 16
    weights = parameter_bytes(description.spec, torch.float32)
    tight = plan(description, free=weights + (1 << 20) + 20 * BLOCK_BYTES)
    assert tight.num_blocks == 20
    assert tight.max_context_tokens == 256


def test_context_follows_the_cache_unless_it_was_given(description: ModelDescription) -> None:
    """The model's own length where it fits, less where it does not; a given one is kept or refused."""
    assert plan(description, num_blocks=99).max_context_tokens == 256
    assert plan(description, num_blocks=5).max_context_tokens == 80
    assert plan(description, num_blocks=5, max_context_tokens=80).max_context_tokens == 80
    with pytest.raises(MemoryBudgetError, match="max_context_tokens 81 does not fit a cache of 5 blocks"):
        plan(description, num_blocks=5, max_context_tokens=81)
    with pytest.raises(MemoryBudgetError, match="more than the model's max_position_embeddings 256"):
        plan(description, max_context_tokens=257)


@pytest.mark.parametrize(
    "settings", [{"num_blocks": 1 << 20}, {"kv_cache_bytes": 1 << 40}, {"kv_cache_bytes": 5}]
)
def test_what_does_not_fit_is_refused(description: ModelDescription, settings: dict[str, int]) -> None:
    """With every part's size and the settings that help."""
    with pytest.raises(MemoryBudgetError, match=r"MiB to plan with; weights take .* lower arena_bytes"):
        plan(description, **settings)
    with pytest.raises(MemoryBudgetError, match="lower arena_bytes"):
        plan(description, free=1 << 20)


def test_two_sizes_for_one_cache_are_refused(description: ModelDescription) -> None:
    """Which one counts would be a guess."""
    with pytest.raises(MemoryBudgetError, match="give one"):
        plan(description, num_blocks=1, kv_cache_bytes=1)


@pytest.mark.parametrize(("has_driver", "warnings"), [(False, 0), (True, 1)])
def test_auto_is_the_cpu_where_torch_sees_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_driver: bool, warnings: int
) -> None:
    """Also beside a GPU's driver, with a line that says why."""
    driver = tmp_path / "driver"
    if has_driver:
        driver.touch()
    monkeypatch.setattr(backend, "_DRIVER", driver)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    directory = write_model(tmp_path / "model", make_weights(CONFIG))
    with structlog.testing.capture_logs() as lines:
        loaded = load_backend(BackendConfig(model_dir=str(directory), device="auto", num_blocks=8))
    assert loaded.info.dtype == "float32"
    found = [line for line in lines if line["event"] == "engine.gpu_not_used"]
    assert len(found) == warnings
    assert all(line["device"] == "cpu" and line["torch"] == torch.__version__ for line in found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "device 'tpu' is not supported"),
        ({"device": "cuda:99"}, "finds [0-9]+ GPUs on this machine; --device cpu"),
        ({"device": "meta"}, "device 'meta' is not supported"),
        ({"load_format": "pickle"}, "load_format 'pickle' is none of auto, dummy"),
        ({"dtype": "int4"}, "dtype 'int4' is not supported"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    """By name, before anything is loaded."""
    config = replace(BackendConfig(model_dir=str(write_model(tmp_path, {}))), **settings)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelConfigError, match=message):
        load_backend(config)
