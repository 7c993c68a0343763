"""`lorikeet bench engine`, `serve` and `profile` as people run them, on tiny models on a CPU."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lorikeet_bench.engine.launch import loaded_engine
from lorikeet_bench.engine.plan import EnginePlan
from lorikeet_bench.engine.target import EngineTarget
from lorikeet_bench.load.arrivals import ClosedLoop
from lorikeet_bench.load.driver import run_load
from lorikeet_bench.load.judge import Expectation, TokenJudge
from lorikeet_bench.load.lengths import LengthRange
from lorikeet_bench.load.plan import LoadPlan
from lorikeet_bench.load.rig_tokens import RigTokens, rig_shape
from lorikeet_bench.rigs import write_copy_base, write_moe_watermark
from tests.support.stack import Stack

LENGTHS = ("--input-tokens", "8:24", "--output-tokens", "6:12")
SHORT = ("--device", "cpu", *LENGTHS)
# gpt-oss with everything small; its experts stay packed.
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 512,
    "eos_token_id": 500,
    "pad_token_id": None,
    "layer_types": ["sliding_attention", "full_attention"],
}


def bench(root: Path, *arguments: str, before: tuple[str, ...] = ()) -> tuple[int, dict[str, Any], str]:
    """Run a command: exit code, its JSON, what it printed."""
    result = root / "result.json"
    done = run(*before, "bench", *arguments, "--json", str(result))
    assert result.exists(), done.stderr + done.stdout
    return done.returncode, json.loads(result.read_text()), done.stdout + done.stderr


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command line."""
    command = [sys.executable, "-m", "lorikeet_admin", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def tiny_shape() -> list[str]:
    """Options that name the tiny model."""
    sets = [f"{name}={json.dumps(value)}" for name, value in TINY.items()]
    return ["--shape", "gpt-oss-20b", *(word for item in sets for word in ("--shape-set", item))]


@pytest.mark.long
def test_the_engine_is_measured_and_every_token_is_compared(tmp_path: Path) -> None:
    """A sweep over a rig, twice: rates, percentiles, routing, a plot, no wrong token."""
    plot = tmp_path / "plot.svg"
    code, result, printed = bench(
        tmp_path,
        *("engine", "--rig", "--concurrency", "1,3", "--adapters", "0,3", "--repeats", "2", *SHORT),
        *("--base-share", "0.3", "--probe-steps", "3", "--plot", str(plot)),
    )
    assert code == 0, printed
    assert result["passed"]
    assert [(p["adapters"], p["concurrency"]) for p in result["points"]] == [(0, 1), (0, 3), (3, 1), (3, 3)]
    for point in result["points"]:
        assert point["wrong"] == 0
        assert len(point["repeats"]) == 2
        assert point["checked_tokens"] > sum(repeat["output_tokens"] for repeat in point["repeats"])
        median = point["median"]
        assert median["failures"] == {}
        assert 0 < median["ttft_ms"]["median"] <= median["end_to_end_ms"]["median"]
        assert median["tokens_per_s"] > 0
        routing = point["routing"]
        assert routing["rows"] == pytest.approx(point["concurrency"], abs=0.01)
        assert 2 <= routing["experts"] <= 2 * point["concurrency"]
        assert (routing["pairs"] > 0) == (point["adapters"] > 0)
    assert "tokens compared with what each adapter must say" in printed
    assert plot.read_text().startswith("<?xml")


@pytest.mark.long
def test_random_weights_are_measured_with_random_adapters(tmp_path: Path) -> None:
    """Packed experts, four read by each row; nothing is cached, and each adapter has its bytes."""
    load = (*tiny_shape(), "--concurrency", "2", "--adapters", "2", "--rank", "4", "--requests", "4", *SHORT)
    code, result, printed = bench(tmp_path, "engine", *load, "--routing-floor", "0.1")
    assert code == 0, printed
    (point,), (server,) = result["points"], result["servers"]
    assert 4 <= point["routing"]["experts"] <= 8
    assert 4 <= point["routing"]["pairs"] <= 8
    assert server["adapter_bytes"] > 0
    assert server["settings"]["prefix_cache"] is False
    assert 0 < sum(server["startup_phases"].values()) < server["startup_s"]


@pytest.mark.long
def test_skewed_routing_makes_a_run_void(tmp_path: Path) -> None:
    """Where all rows hold one adapter's token, all go to the same two experts."""
    load = ("--concurrency", "4", "--adapters", "1", *SHORT)
    code, result, printed = bench(tmp_path, "engine", "--rig", *load, "--routing-floor", "0.95")
    assert code == 1
    assert not result["passed"]
    assert "VOID" in result["failures"][0]
    assert "VOID" in printed


async def test_an_answer_by_another_adapter_is_found(tmp_path: Path) -> None:
    """On one engine: with two adapters' revisions exchanged every request to them is wrong, then none is."""
    shape = rig_shape(3)
    tokens = RigTokens(shape, 3)
    plan = EnginePlan(
        write_copy_base(tmp_path / "model", shape),
        tmp_path,
        device="cpu",
        slots=3,
        most_open=3,
        longest=40,
        rig=shape,
    )
    load = LoadPlan(
        ClosedLoop(3), 3, input_tokens=LengthRange(8, 8), output_tokens=LengthRange(4, 4), num_requests=9
    )
    async with loaded_engine(plan, tokens.forced) as engine:
        digests = [adapter.digest for adapter in engine.store.adapters]
        expected = Expectation(digests, tokens.forced)
        for named, num_wrong in (([digests[1], digests[0], digests[2]], 6), (digests, 0)):
            judge = TokenJudge(expected)
            judge.look((await run_load(EngineTarget(engine.client, tokens.prompts(), named), load)).records)
            assert judge.wrong == num_wrong, judge.shown
            assert judge.checked_tokens == 9 * 4


@pytest.mark.long
def test_a_node_of_its_own_is_measured_over_grpc(tmp_path: Path) -> None:
    """A Poisson load of text, without a manager; the right revision answers each request."""
    code, result, printed = bench(
        tmp_path,
        *("serve", *tiny_shape(), "--text", "--rate", "30", "--adapters", "2", "--rank", "8"),
        *("--mix", "zipf:1.0", "--requests", "12", *SHORT),
    )
    assert code == 0, printed
    (point,) = result["points"]
    assert result["boundary"] == "gRPC stream"
    assert point["rate"] == 30
    assert point["median"]["requests"] == 12
    assert point["wrong"] == 0
    # Words of five bytes, a token each: within one word of what was asked.
    assert 12 * 8 - 60 <= point["median"]["input_tokens"] <= 12 * 24 + 60
    assert result["servers"][0]["startup_s"] > 0


@pytest.mark.long
async def test_a_stack_that_runs_gets_adapters_for_the_time_of_the_load(tmp_path: Path) -> None:
    """Pushed through the manager, loaded, deleted; adapters that are there may be named."""
    shape = rig_shape(3)
    async with Stack(write_copy_base(tmp_path / "base", shape), tmp_path / "stack") as stack:
        address = ("--inference", stack.node_address, "--manager", stack.manager_address)
        before = (*address, "--token", stack.token)
        load = ("serve", "--running", "--requests", "4", "--concurrency", "2", *LENGTHS)
        code, result, printed = await asyncio.to_thread(
            bench, tmp_path, *load, "--upload", "--adapters", "2", "--rank", "4", before=before
        )
        assert code == 0, printed
        assert result["points"][0]["wrong"] == 0
        await stack.upload(write_moe_watermark(tmp_path / "mine", 5, shape), "demo/mine")
        code, result, printed = await asyncio.to_thread(
            bench, tmp_path, *load, "--adapter", "demo/mine", before=before
        )
        assert code == 0, printed
        assert result["points"][0]["adapters"] == 1
        for wrong, code, message in (
            (("--adapter", "demo/none"), 3, "demo/none"),
            (("--upload", "--adapters", "1", "--rank", "300"), 1, "rank"),
            (("--upload", "--adapters", "1", "--tenant", "nosuch"), 3, "there is no tenant 'nosuch'"),
        ):
            refused = await asyncio.to_thread(run, *before, "bench", *load, *wrong)
            assert refused.returncode == code, refused.stderr
            assert message in refused.stderr
            assert "there is no adapter 'demo/bench-000'" not in refused.stderr


@pytest.mark.long
def test_a_load_that_is_terminated_leaves_nothing_behind(tmp_path: Path) -> None:
    """SIGTERM while the node starts: it is stopped, and the exit code is the signal's."""
    command = [sys.executable, "-m", "lorikeet_admin", "bench", "serve", "--rig", "--duration", "600", *SHORT]
    with subprocess.Popen([*command, "--data-dir", str(tmp_path)]) as running:
        bench_process = psutil.Process(running.pid)
        while not (children := bench_process.children(recursive=True)):
            assert running.poll() is None
            time.sleep(0.05)
        running.terminate()
        assert running.wait() == 128 + signal.SIGTERM
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive


def profiles(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each load."""
    return [point["profile"] for point in result["profiles"]]


@pytest.mark.long
def test_a_decode_step_is_profiled(tmp_path: Path) -> None:
    """Operators, each load on the same engine; no floor, which is a GPU's, and no notes of the profiler's."""
    code, result, printed = bench(
        tmp_path,
        *("profile", *tiny_shape(), "--device", "cpu", "--concurrency", "1,2", "--adapters", "0,2"),
        *("--rank", "8", "--input-tokens", "12", "--steps", "4"),
    )
    assert code == 0, printed
    loads = [(point["concurrency"], point["adapters"]) for point in result["profiles"]]
    assert loads == [(1, 0), (2, 0), (1, 2), (2, 2)]
    for rows, adapters, profile in zip((1, 2, 1, 2), (0, 0, 1, 2), profiles(result), strict=True):
        assert (profile["rows"], profile["adapters"], profile["steps"]) == (rows, adapters, 4)
        assert profile["step_us"] > 0
        assert profile["busy_us"] == pytest.approx(sum(op["us"] for op in profile["ops"]))
        assert any(op["name"].startswith("aten::") for op in profile["ops"])
    assert "its floor" not in printed
    assert "not seen" not in printed
    assert "USDT" not in printed
    floor = result["profiles"][-1]["floor"]
    assert min(floor[part] for part in ("dense", "experts", "lm_head", "adapters", "kv_cache")) > 0
    floors = {part["part"]: part["floor_us"] for part in result["profiles"][-1]["parts"]}
    assert floors["lm_head"] == pytest.approx(1e6 * floor["lm_head"] / 4.3e12)
