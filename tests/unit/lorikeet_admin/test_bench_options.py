"""What the load's options mean together, and what is refused."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lorikeet_admin.commands.bench_options import LoadOptions, ModelOptions, routing_floor, settings
from lorikeet_bench.load.arrivals import Pace
from lorikeet_bench.load.generated_adapters import AdapterShape
from lorikeet_bench.load.lengths import LoadError

MODEL = ModelOptions(
    model_dir=None,
    shape="mixtral-8x7b",
    shape_set=(),
    rig=False,
    load_format="",
    device="cpu",
    dtype="auto",
    engine_set=(),
)


def test_sweeps_are_lists() -> None:
    """Concurrency or rate, and adapters."""
    sweep = LoadOptions(concurrency="1, 16", adapters="0,8,0").sweep()
    assert [a.name for a in sweep.arrivals] == ["concurrency 1", "concurrency 16"]
    assert sweep.adapters == (0, 8)
    rates = LoadOptions(rate="2,4.5", arrivals=Pace.BURST).sweep()
    assert [a.name for a in rates.arrivals] == ["burst 2/s", "burst 4.5/s"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LoadOptions(concurrency="x"), "--concurrency 'x'"),
        (LoadOptions(concurrency="0"), "--concurrency must be at least 1"),
        (LoadOptions(adapters="-1"), "--adapters '-1'"),
        (LoadOptions(rate="fast"), "--rate 'fast'"),
        (LoadOptions(requests=3, duration=1.0), "one of --requests and --duration"),
        (LoadOptions(arrivals=Pace.RECORDED), "needs --lengths"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: LoadOptions, message: str) -> None:
    """By name."""
    with pytest.raises(LoadError, match=message):
        options.sweep()


def test_recorded_arrivals_take_the_whole_file(tmp_path: Path) -> None:
    """As many requests as it has lines."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_tokens": 5, "output_tokens": 2, "arrival_s": 0.5}\n' * 3)
    (plan,) = LoadOptions(lengths=path, arrivals=Pace.RECORDED).sweep().plans()
    assert plan.num_requests == 3
    assert [request.arrival_s for request in plan.requests()] == [0.5] * 3


def test_one_model_is_named(tmp_path: Path) -> None:
    """A shape gets random weights, a rig its own."""
    for wrong in (replace(MODEL, shape=""), replace(MODEL, rig=True)):
        with pytest.raises(LoadError, match="exactly one of --model-dir, --shape and --rig"):
            wrong.materialize(tmp_path, 0)
    with pytest.raises(LoadError, match="'gpt-6' is none of"):
        replace(MODEL, shape="gpt-6").materialize(tmp_path, 0)
    path, load_format, rig = MODEL.materialize(tmp_path, 0)
    assert (load_format, rig) == ("dummy", None)
    assert (path / "config.json").exists()
    _, load_format, rig = replace(MODEL, shape="", rig=True).materialize(tmp_path, 40)
    assert load_format == "auto"
    assert rig is not None
    assert rig.vocab == 128


def test_each_number_of_adapters_may_have_its_own_engine(tmp_path: Path) -> None:
    """With as many slots; otherwise one engine has them all."""
    sweep = LoadOptions(concurrency="1,32", adapters="0,8,32").sweep()
    model = replace(MODEL, shape="", model_dir=tmp_path)
    _, shared = model.plans(tmp_path, sweep, AdapterShape(), own_slots=False)
    assert [(plan.slots, part.adapters) for plan, part in shared] == [(32, (0, 8, 32))]
    _, own = model.plans(tmp_path, sweep, AdapterShape(), own_slots=True)
    assert [(plan.slots, part.adapters) for plan, part in own] == [(0, (0,)), (8, (8,)), (32, (32,))]
    assert {plan.most_open for plan, _ in own} == {32}


def test_settings_are_json_or_words() -> None:
    """KEY=VALUE."""
    assert settings(["a=1", "b=true", "c=cpu", "d=[1, 2]"], "--x") == {
        "a": 1,
        "b": True,
        "c": "cpu",
        "d": [1, 2],
    }
    with pytest.raises(LoadError, match="--x 'a' is not KEY=VALUE"):
        settings(["a"], "--x")


def test_only_random_weights_are_judged_by_their_routing() -> None:
    """Unless asked."""
    assert routing_floor(None, "dummy") == 0.95
    assert routing_floor(None, "auto") is None
    assert routing_floor(0.5, "auto") == 0.5


def test_the_command_line_starts_without_torch() -> None:
    """Importing it takes seconds, which no other command should."""
    code = "import sys, lorikeet_admin.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
