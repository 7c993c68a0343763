"""What a bench's tables say, and what they leave out."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from lorikeet_admin.load_report import show
from lorikeet_admin.output import Output
from lorikeet_admin.profile_report import show_profile
from lorikeet_admin.soak_report import SoakProgressLine
from lorikeet_bench.engine.decode_profile import DecodeProfile, OpTime, ProfiledPoint
from lorikeet_bench.load.generator_cost import GeneratorCost
from lorikeet_bench.load.metrics import Distribution, LoadSummary
from lorikeet_bench.load.model_part import ModelPart
from lorikeet_bench.load.result import BenchResult, PointResult, ServerFacts
from lorikeet_bench.load.routing import RoutingSummary
from lorikeet_bench.load.step_floor import DecodeStepBytes
from lorikeet_bench.machine import describe_machine
from lorikeet_bench.soak.run import SoakProgress

ONE = Distribution.of([1.0])
SUMMARY = LoadSummary(
    *(3, {}, 1.0, 10, 10, 10.0, 3.0),
    *(ONE, ONE, ONE, ONE, ONE, 1.0),
    GeneratorCost(0.0, 0.0, 0.0, 0.0),
)
POINT = PointResult("p", 0, 1, None, (SUMMARY,), SUMMARY, "", routing=RoutingSummary(8, 4, 6, 8, 0, 0))
FACTS = ServerFacts("m", "float32", "", 1, None, 0, 2.0, 0)
RESULT = BenchResult("gRPC stream", describe_machine(), {}, (FACTS,), (POINT,))


def shown(result: BenchResult, capsys: pytest.CaptureFixture[str]) -> str:
    """The tables."""
    show(result, Output(as_json=False))
    return capsys.readouterr().out


def test_a_device_that_is_not_known_is_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A node that runs elsewhere does not tell it."""
    assert "m in float32, 1 adapter of 0 B" in shown(RESULT, capsys)
    assert "m in float32 on cpu, " in shown(replace(RESULT, servers=(replace(FACTS, device="cpu"),)), capsys)


def test_a_start_is_told_phase_by_phase(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the engine told them; a node elsewhere does not."""
    assert "start-up" not in shown(RESULT, capsys)
    started = replace(FACTS, startup_s=9.0, startup_phases={"process": 4.25, "weights": 2.5})
    text = shown(replace(RESULT, servers=(started,)), capsys)
    assert "ready after 9.0 s" in text
    assert "start-up, s: process 4.2, weights 2.5" in text


def test_routing_that_is_not_judged_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """75 % of even would void random weights."""
    text = shown(RESULT, capsys)
    assert "75.0 % of 8.00" in text
    assert "told, not judged" in text
    assert "not judged" not in shown(replace(RESULT, routing_floor=0.5), capsys)


def test_figures_of_bursts_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    """Decode rates and times between tokens."""
    assert "bursts" not in shown(RESULT, capsys)
    median = replace(SUMMARY, burst_share=0.5)
    text = shown(replace(RESULT, points=(replace(POINT, median=median),)), capsys)
    (line,) = (line for line in text.splitlines() if "inter-token" in line and "WARNING" not in line)
    assert line.split()[2:6] == ["1.00", "(bursts)", "1.00", "(bursts)"]
    assert "1.0 (bursts)" in text
    assert "WARNING: p: 50 % of the tokens came in bursts" in text


def test_a_profile_of_a_cpu_shows_operators_only() -> None:
    """No floor, which is a GPU's, and no parts; of a GPU both."""
    profile = DecodeProfile(
        "cpu", 4, 1, 1, 9.0, 8.0, 0.0, (OpTime("aten::mm", ModelPart.PROJECTIONS, 2.0, 8.0),)
    )
    floor = DecodeStepBytes(1e6, 1e6, 1e6, 1e6, 1e6)
    file = StringIO()
    console = Console(file=file, width=200)
    show_profile(console, ProfiledPoint.of(1, 1, floor, profile))
    text = file.getvalue()
    assert "1 request over 1 adapter on cpu" in text
    assert "aten::mm" in text
    assert not [word for word in ("floor", "part", "not seen") if word in text]
    on_gpu = DecodeProfile("H200", 4, 1, 1, 9.0, 8.0, 0.0, profile.ops)
    show_profile(console, ProfiledPoint.of(1, 1, floor, on_gpu))
    lines = [line.split() for line in file.getvalue().splitlines()]
    assert ["projections,", "router", "8.0", "0.2", "3", "%"] in lines
    assert ["lm_head", "not", "seen", "0.2"] in lines
    assert ["all", "kernels", "8.0", "1.2", "15", "%"] in lines


def test_a_profile_says_how_many_adapters_were_named_and_sums_small_operators_up() -> None:
    """One request names one adapter of those that were loaded; twenty operators stand alone."""
    ops = tuple(OpTime(f"aten::op{i}", ModelPart.OTHER, 2.0, 30.0 - i) for i in range(23))
    file = StringIO()
    profile = DecodeProfile("cpu", 4, 1, 1, 9.0, 8.0, 0.0, ops)
    floor = DecodeStepBytes(1e6, 1e6, 1e6, 1e6, 1e6)
    show_profile(Console(file=file, width=200), ProfiledPoint.of(1, 2, floor, profile))
    text = file.getvalue()
    assert "1 request over 1 of 2 adapters on cpu" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["3", "others", "6.0", "27.0", "4.50"] in lines
    assert "aten::op19" in text
    assert "aten::op20" not in text


def test_a_soak_is_never_beyond_its_end() -> None:
    """The last second may be told a little late."""
    file = StringIO()
    with SoakProgressLine(Console(file=file, width=500), 60.0) as line:
        line.update(SoakProgress("soaking", 61.2, 0, 0, 0, 0, 1, 0, 0, {}))
    assert "soaking 60/60 s" in file.getvalue()
    assert " 1 adapter " in file.getvalue()
