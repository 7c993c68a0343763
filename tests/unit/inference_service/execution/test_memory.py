"""How memory is shared out, and when start-up is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_service.execution import backend
from inference_service.execution.backend import load_backend
from inference_service.execution.config import BackendConfig
from inference_service.execution.memory import (
    DeviceMemory,
    MemoryBudgetError,
    MemoryPlan,
    check_host_pool,
    plan_memory,
)
from inference_service.models import (
    GenerationDefaults,
    ModelConfigError,
    ModelDescription,
    describe_model,
    parameter_bytes,
)
from inference_service.models.config import ConfigReader
from inference_service.models.registry import declare_model
from lorikeet_bench.model_shape import shape_config, shape_names
from tests.support.tiny_model import CONFIG, make_weights, write_model

CPU = torch.device("cpu")
_, QWEN3_30B = declare_model(ConfigReader("config.json", shape_config("qwen3-30b-a3b")))
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, kv heads, head_dim, block tokens, float32


@pytest.fixture
def description(tmp_path: Path) -> ModelDescription:
    """The tiny model, no weights."""
    return describe_model(write_model(tmp_path, {}))


def plan(description: ModelDescription, free: int = 1 << 30, **settings: Any) -> MemoryPlan:
    """A plan with a 1 MiB arena, for a CPU."""
    config = replace(BackendConfig(model_dir="", arena_bytes=1 << 20), **settings)
    return plan_memory(config, description, torch.float32, CPU, DeviceMemory(free, free))


def sizes(plan: MemoryPlan) -> dict[str, int]:
    """Bytes by part."""
    return {part.name: part.num_bytes for part in plan.parts}


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
    others = sum(size for name, size in sizes(plan(description)).items() if name != "key-value cache")
    tight = plan(description, free=others + 21 * BLOCK_BYTES)  # one is for rows that fill a batch up
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
    with pytest.raises(MemoryBudgetError, match=r"MiB to plan with, and that is too little: weights"):
        plan(description, **settings)
    with pytest.raises(MemoryBudgetError, match="too little"):
        plan(description, free=1 << 20)


H200, RTX_4090 = 141 * 10**9, 24 << 30
GPU = torch.device("cuda")


def shape(tmp_path: Path, name: str) -> ModelDescription:
    """A released model's config."""
    (tmp_path / "config.json").write_text(json.dumps(shape_config(name)))
    return describe_model(tmp_path)


def plan_gpu(description: ModelDescription, total: int, used: int = 500 << 20, **settings: Any) -> MemoryPlan:
    """For a GPU of which `used` is taken already, in bfloat16."""
    config = replace(BackendConfig(model_dir="", device="cuda"), **settings)
    return plan_memory(config, description, torch.bfloat16, GPU, DeviceMemory(total, total - used))


@pytest.mark.parametrize("name", shape_names())
@pytest.mark.parametrize("total", [16 << 30, RTX_4090, 80 << 30, H200, 288 << 30])
def test_a_plan_fits_or_names_every_part(tmp_path: Path, name: str, total: int) -> None:
    """Each released model on GPUs of five sizes; where only the context is too long, what is offered fits."""
    description = shape(tmp_path, name)
    weights = parameter_bytes(description.spec, torch.bfloat16)
    context_tokens = 4096
    try:
        try:
            found = plan_gpu(description, total, max_context_tokens=context_tokens)
        except MemoryBudgetError as error:
            offered = re.search(r"does not fit a cache of .* lower it to (\d+) ", str(error))
            if offered is None:
                raise
            context_tokens = int(offered[1])
            found = plan_gpu(description, total, max_context_tokens=context_tokens)
    except MemoryBudgetError as error:
        assert weights > 0.5 * total
        for part in ("weights", "adapter arena", "lora workspaces", "activations", "sampling", "cuda graphs"):
            assert f"{part} " in str(error)
        assert "gpu_memory_utilization 0.92 of" in str(error)
        return
    assert found.budget_bytes == int(total * 0.92) - (500 << 20)
    assert weights < found.used_bytes <= found.budget_bytes
    assert found.num_blocks * 16 >= context_tokens > 0
    assert all(part.num_bytes > 0 for part in found.parts)
    line = found.fields()
    assert line["budget_bytes"] - line["unused_bytes"] == found.used_bytes
    assert line["weights_bytes"] == weights


def test_gpt_oss_20b_on_an_h200_and_on_a_small_gpu(tmp_path: Path) -> None:
    """Room for a full batch of long contexts on the one; on the other it fits, with a small step."""
    description = shape(tmp_path, "gpt-oss-20b")
    large = plan_gpu(description, H200, arena_bytes=26 << 30, max_context_tokens=8192)
    assert large.num_blocks == 64 * 8192 // 16
    assert large.fields()["unused_bytes"] > 20 << 30
    small = plan_gpu(description, RTX_4090, max_rank=32)
    assert 12 << 30 < sizes(small)["weights"] < 13 << 30
    assert small.num_blocks * 16 > 30_000
    with pytest.raises(MemoryBudgetError, match=r"adapter arena 12288\.0 MiB \(adapter_arena_bytes\)"):
        plan_gpu(description, RTX_4090, arena_bytes=12 << 30)


@given(
    utilization=st.floats(0.3, 1.0),
    used=st.integers(0, 30 << 30),
    step=st.integers(16, 16384),
    requests=st.integers(1, 512),
    rank=st.integers(1, 256),
    arena=st.integers(0, 64 << 30),
    graphs=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_no_plan_takes_more_than_its_share(
    utilization: float, used: int, step: int, requests: int, rank: int, arena: int, graphs: bool
) -> None:
    """Whatever the settings; and each larger setting takes no less."""
    description = ModelDescription(
        Path(), "", ConfigReader("config.json", {}), QWEN3_30B, GenerationDefaults(())
    )
    chosen: dict[str, Any] = {
        "gpu_memory_utilization": utilization, "max_step_tokens": step, "max_running_requests": requests,
        "max_rank": rank, "arena_bytes": arena, "cuda_graphs": graphs,
    }  # fmt: skip
    try:
        found = plan_gpu(description, H200, used, **chosen)
    except MemoryBudgetError:
        return
    assert used + found.used_bytes <= int(H200 * utilization)
    more = plan_gpu(description, 2 * H200, used, **chosen | {"max_step_tokens": 2 * step, "num_blocks": 8})
    assert sizes(more)["activations"] >= sizes(found)["activations"]


def test_a_pool_that_would_take_the_machines_memory_is_refused(description: ModelDescription) -> None:
    """With what it may be at most."""
    planned = plan(description, host_pool_bytes=10 << 30)
    check_host_pool(planned, available=12 << 30)
    with pytest.raises(MemoryBudgetError, match=r"host_pool_bytes is 10240.0 MiB.* at most 9216.0 MiB"):
        check_host_pool(planned, available=10 << 30)


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
