"""What a start runs before requests: steps that leave nothing behind, and which ops there are."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from inference_service.domain.engine import BackendUnusableError
from inference_service.domain.step import ModelRunnerOutput, SchedulerOutput
from inference_service.execution import warm_up_ops
from inference_service.execution.backend import DeviceBackend, load_backend, make_builder
from inference_service.execution.config import BackendConfig
from inference_service.execution.request_table import RequestTable
from inference_service.execution.step_buffers import StepInputs
from inference_service.execution.warm_up import StepLimits, capture_all, run_steps
from inference_service.execution.warm_up_ops import check_heads, linears, warm_up_readers
from tests.support.fixtures import FIXTURES
from tests.support.random_adapters import activate_random
from tests.support.runner import DrivenRequest, drive, make_backend
from tests.support.tiny_model import write_model


def make(path: Path, **changes: object) -> DeviceBackend:
    """A small backend."""
    config = BackendConfig(
        str(path), num_threads=1, num_blocks=20, block_tokens=8, max_step_tokens=100, max_context_tokens=60,
        max_running_requests=4, arena_bytes=8 << 20, host_pool_bytes=32 << 20, **changes,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    return load_backend(config)


def test_steps_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths beyond a request's context go to several; afterwards requests run as without them."""
    path = write_model(tmp_path / "model")
    requests = [DrivenRequest((1, 2, 3), slot) for slot in (-1, 0)]
    cold, warm = make(path), make(path)
    lengths: list[int] = []
    execute = warm.runner.execute

    def noted(step: SchedulerOutput) -> ModelRunnerOutput:
        lengths.append(step.num_tokens)
        return execute(step)

    monkeypatch.setattr(warm.runner, "execute", noted)
    run_steps(warm.runner, StepLimits(100, 4, 60, 160, 8))
    assert lengths[0] == 100
    assert {1, 2, 17, 64} <= set(lengths)
    assert len(warm.runner._table) == 0
    for backend in (cold, warm):
        activate_random(backend, tmp_path / "adapter", 0, rank=4)
    assert drive(warm, requests, num_tokens=6) == drive(cold, requests, num_tokens=6)


@pytest.mark.parametrize(
    ("model", "count"),
    # A layer has qkv, o and a router, or gate_up and down, or both; latent attention has four or three.
    [("qwen3_moe", 9), ("gpt_oss", 12), ("llama4", 18), ("deepseek_v2", 17)],
)
def test_every_projection_is_found(model: str, count: int) -> None:
    """Each kind of layer's; none has heads that a GPU could not serve."""
    backend = load_backend(BackendConfig(str(FIXTURES / "models" / model), num_threads=1, num_blocks=8))
    decoder = backend.runner._forward.model
    found = list(linears(decoder))
    assert len(found) == len(set(map(id, found)))
    weights = {id(linear.weight) for linear in found}
    assert id(decoder.lm_head.weight) not in weights
    assert len(found) == count
    check_heads(decoder)


def test_heads_too_wide_for_the_kernels_are_refused(tmp_path: Path) -> None:
    """By their width, before anything is compiled."""
    backend = make(write_model(tmp_path / "model", head_dim=640))
    with pytest.raises(BackendUnusableError, match="640 elements are wider than 512"):
        check_heads(backend.runner._forward.model)


def test_a_fixed_shape_of_no_request_is_all_padding(tmp_path: Path) -> None:
    """What a graph is captured with: no tokens, no adapters, the spare block."""
    backend = make(write_model(tmp_path / "model"), graph_batch_sizes=(3,))
    runner = backend.runner
    (short,) = runner._builder.shapes.all()
    inputs = runner._builder.idle(short)
    assert inputs.token_slot.tolist() == [-1] * 3
    assert inputs.sequence_lens.tolist() == [0] * 3
    assert inputs.query_starts.tolist() == [0, 1, 2, 3]
    assert inputs.slot_mapping.tolist() == [20 * 8] * 3
    assert inputs.source_rows.tolist() == [0] * 3
    assert inputs.places.tolist() == [4] * 3
    before = [cache.keys[:-1].clone() for cache in runner._forward.cache]
    with torch.inference_mode():
        hidden = runner._graphs.run(inputs, has_adapters=False)
    assert hidden.states.isfinite().all()
    assert all(
        torch.equal(cache.keys[:-1], keys) for cache, keys in zip(runner._forward.cache, before, strict=True)
    )
    builder = make_builder(BackendConfig("", graph_batch_sizes=()), RequestTable(4, 60, 8), runner._forward)
    assert builder.shapes.pick(1, 1) is None
    assert builder.shapes.pick_mixed(5, 5) is None


def test_a_fixed_step_with_prompts_of_no_request_is_all_padding(tmp_path: Path) -> None:
    """Requests without rows, rows without requests."""
    backend = make(write_model(tmp_path / "model"), graph_token_counts=(9,))
    runner = backend.runner
    (shape,) = runner._builder.shapes.all()
    inputs = runner._builder.idle(shape)
    assert inputs.token_slot.tolist() == [-1] * 9
    assert inputs.query_starts.tolist() == [0] * 5
    assert inputs.sequence_lens.tolist() == [0] * 4
    assert inputs.slot_mapping.tolist() == [20 * 8] * 9
    assert inputs.source_rows.tolist() == [0] * 9
    assert inputs.places.numel() == 0


def test_a_capture_that_fails_ends_the_start_with_advice(tmp_path: Path) -> None:
    """Largest shape first, with adapters first; the error says which and what to do."""
    backend = make(write_model(tmp_path / "model"), graph_batch_sizes=(1, 3), graph_token_counts=(50,))
    asked: list[tuple[int, bool]] = []

    class Graphs:
        """Captures but the last."""

        def capture(self, inputs: StepInputs, *, has_adapters: bool) -> None:
            asked.append((inputs.shape.num_rows, has_adapters))
            if len(asked) in (2, 7):
                raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphs: Any = Graphs()
    with pytest.raises(BackendUnusableError, match=r"of 50 tokens .* capturing; .*--graph-token-counts"):
        capture_all(graphs, backend.runner._builder)
    with pytest.raises(BackendUnusableError, match=r"of 1 requests .* capturing; .*--no-cuda-graphs"):
        capture_all(graphs, backend.runner._builder)
    assert asked[2:] == [(50, True), (50, False), (3, True), (3, False), (1, True)]


@pytest.mark.parametrize("model", ["gpt_oss", "qwen3", "llama4", "qwen2_moe", "deepseek_v3", "granitemoe"])
def test_every_reader_of_deltas_is_asked_for(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, activations, attention's inputs: a decode step reads no delta of a width that no warm-up had."""
    read: set[tuple[str, int, bool]] = set()

    def note(name: str, op: Callable[..., object], *given: Any, **options: Any) -> object:
        delta = options.get("delta", given[4] if name == "rms_norm" and len(given) > 4 else None)
        if delta is not None:
            read.add((name, delta.shape[1:].numel(), options["delta_is_joined"]))
        return op(*given, **options)

    for module, name in (
        ("norm", "rms_norm"),
        ("dense_mlp", "gated_activation"),
        ("attention", "attention_inputs"),
    ):
        place = f"inference_service.layers.{module}.{name}"
        monkeypatch.setattr(place, partial(note, name, resolve_name(place.replace(f".{name}", f":{name}"))))
    backend = make_backend(model, graph_batch_sizes=(2,), lora_overlap=True)
    runner = backend.runner
    with torch.inference_mode():
        launched = warm_up_readers(runner._forward)
        warm = read.copy()
        assert {is_joined for _, _, is_joined in warm} == {False, True}
        assert launched >= len(warm)
        (shape,) = runner._builder.shapes.all()
        read.clear()
        runner._graphs.run(runner._builder.idle(shape), has_adapters=True)
    assert read
    assert read <= warm


@pytest.mark.parametrize(
    ("model", "expected"),
    [("qwen3_moe", (False, False)), ("deepseek_v2", (True, False)), ("qwen2_moe", (True, True))],
)
def test_a_gated_shared_expert_is_told_from_a_plain_one(
    model: str, expected: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows come whole, so that their sum is another kernel."""
    asked: list[tuple[bool, bool]] = []

    def note(*_: object, has_shared: bool, is_shared_gated: bool, **__: object) -> int:
        asked.append((has_shared, is_shared_gated))
        return 1

    monkeypatch.setattr(warm_up_ops, "warm_up_experts", note)
    for name in ("warm_up_router", "warm_up_moe"):
        monkeypatch.setattr(warm_up_ops, name, lambda *_, **__: 0)
    assert warm_up_ops.warm_up_moes(make_backend(model).runner._forward, max_tokens=8) == 1
    assert asked == [expected]
