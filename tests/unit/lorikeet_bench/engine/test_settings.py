"""A bench's engine: what it makes of the options of a command."""

from pathlib import Path

import pytest

from lorikeet_bench.engine.plan import EnginePlan
from lorikeet_bench.engine.settings import engine_config
from lorikeet_bench.load.generated_adapters import AdapterShape
from lorikeet_bench.load.lengths import LoadError
from lorikeet_bench.model_shape import shape_names, write_model_shape


def plan(tmp_path: Path, shape: str, slots: int, adapters: AdapterShape) -> EnginePlan:
    """An engine on a CPU."""
    directory = write_model_shape(tmp_path, shape)
    return EnginePlan(directory, tmp_path, "dummy", "cpu", slots=slots, adapters=adapters)


@pytest.mark.parametrize("shape", shape_names())
def test_every_shape_takes_adapters_whose_sites_are_not_named(tmp_path: Path, shape: str) -> None:
    """With memory for all of them."""
    base, eight = (engine_config(plan(tmp_path, shape, slots, AdapterShape())) for slots in (0, 8))
    assert eight.arena_bytes > base.arena_bytes
    assert eight.max_active_adapters == 8


def test_sites_are_checked_where_adapters_are_made(tmp_path: Path) -> None:
    """A base model alone has none."""
    made = AdapterShape(sites=("kv_a",))
    engine_config(plan(tmp_path, "qwen3-32b", 0, made))
    with pytest.raises(LoadError, match=r"sites kv_a are not the model's, which has .*mlp_gate_up"):
        engine_config(plan(tmp_path, "qwen3-32b", 1, made))
