"""Command lines of `lorikeet bench` that are refused before anything starts."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inference_service.engine.config import EngineConfig
from lorikeet_admin.app import app
from lorikeet_admin.commands.bench_options import running_adapters
from lorikeet_bench.load.lengths import LoadError


def usage_error(*arguments: str) -> str:
    """What a command line that is wrong usage says, in one line."""
    done = CliRunner(env={"COLUMNS": "500"}).invoke(app, ["bench", *arguments])
    assert done.exit_code == 2, done.output
    return done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("engine --rig --rank 300", "--rank would have no effect with --rig"),
        ("engine --rig --sites foo", "--sites would have no effect with --rig"),
        ("engine --rig --shape-set a=1", "--shape-set would have no effect without --shape"),
        ("engine --rig --concurrency 2 --rate 2", "--concurrency would have no effect with --rate"),
        ("engine --rig --points 1:2 --adapters 2", "--adapters would have no effect with --points"),
        ("engine --rig --points 1:2,3", "--points '1:2,3' is no list of CONCURRENCY:ADAPTERS"),
        ("engine --rig --points 0:1", "--points '0:1': a concurrency must be at least 1"),
        ("engine --rig --points 1:x", "--points 'x' is no list of numbers"),
        ("engine --rig --arrivals constant", "--arrivals would have no effect without --rate"),
        ("engine --rig --rate 2 --burst 4", "--burst would have no effect without --arrivals burst"),
        ("engine --rig --adapters 2 --mix zipf", "zipf:ALPHA"),
        ("serve --running --rig", "--rig would have no effect with --running"),
        ("serve --running --shape x --dtype auto", "--shape and --dtype would have no effect with --running"),
        ("serve --rig --adapter demo/pirate", "--adapter would have no effect without --running"),
        ("serve --rig --upload", "--upload would have no effect without --running"),
        ("serve --running --rank 4", "--rank would have no effect without --upload"),
        ("serve --running --upload --adapter a/b", "give one of --adapter"),
        ("serve --running --upload", "--adapters 8"),
        ("serve --running --adapters 2", "--adapters 2, but 0 are named"),
        ("serve --running --adapter a/b --adapters 0", "never asks for"),
        ("profile --shape-set a=1", "--shape-set would have no effect without --shape"),
    ],
)
def test_what_would_be_ignored_is_wrong_usage(line: str, message: str) -> None:
    """By the option's name."""
    assert message in usage_error(*line.split())


def test_adapters_that_are_named_are_asked_for() -> None:
    """All of them, unless the number is given."""
    assert running_adapters("0", 3, is_given=False, upload=False) == "3"
    assert running_adapters("0,2", 3, is_given=True, upload=False) == "0,2"
    assert running_adapters("0", 0, is_given=False, upload=False) == "0"
    assert running_adapters("8", 0, is_given=True, upload=True) == "8"
    with pytest.raises(LoadError, match="but 3 are named"):
        running_adapters("4", 3, is_given=True, upload=False)


@pytest.mark.parametrize("command", ["engine", "serve", "profile"])
def test_a_result_that_cannot_be_written_is_wrong_usage(tmp_path: Path, command: str) -> None:
    """A file where a directory should be."""
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "result.json")
    assert "cannot write to" in usage_error(command, "--shape", "gpt-oss-20b", "--json", place)


def test_a_plot_of_no_known_kind_is_wrong_usage(tmp_path: Path) -> None:
    """The kinds are told."""
    pytest.importorskip("matplotlib")
    for name in ("x.abc", "x"):
        message = usage_error("engine", "--rig", "--plot", str(tmp_path / name))
        assert "must end in one of" in message
        assert ".svg" in message


def test_a_setting_that_no_engine_has_is_named(tmp_path: Path) -> None:
    """With what it was taken for, or what a node says of it; one that does not exist in the singular."""
    load = ("engine", "--rig", "--device", "cpu", "--data-dir", str(tmp_path))
    for setting, message in (
        ("max_rank=x", '--engine-set max_rank="x": Expected `int`, got `str`; a value is JSON'),
        ("block_tokens=x", '--engine-set block_tokens="x"'),
        ("block_tokens=0", "--engine-set block_tokens=0: Input should be greater than or equal to 1"),
        ("arena_bytes=0", "--engine-set arena_bytes=0: Input should be greater than or equal to 1"),
        ("kv_cache_dtype=int4", "--engine-set kv_cache_dtype=\"int4\": Input should be 'auto', 'fp8'"),
        ("quantization=int4", "--engine-set quantization=\"int4\": Input should be 'fp8'"),
        ("foo=1", "--engine-set: foo is no engine setting; there are"),
    ):
        assert message in usage_error(*load, "--engine-set", setting)


@pytest.mark.parametrize("command", ["engine", "serve", "profile"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--sites foo --adapters 1", "sites foo are not the model's, which has down, "),
        ("--engine-set tile_tables=maybe", "--engine-set tile_tables="),
        ("--dtype int4", "--dtype int4: Input should be 'auto', 'float32'"),
        ("--load-format fast", "--load-format fast: Input should be 'auto' or 'dummy'"),
        ("--shape-set foo=1", "model shape gpt-oss-20b has no foo; it has architectures, attention_bias, "),
        ("--input-tokens 999999", "the longest request has "),
    ],
)
def test_what_no_engine_can_be_is_wrong_usage(command: str, options: str, message: str) -> None:
    """Found before one starts."""
    assert message in usage_error(command, "--shape", "gpt-oss-20b", "--device", "cpu", *options.split())


def test_the_guide_lists_the_engines_settings() -> None:
    """All but the places, which a bench chooses."""
    guide = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text()
    table = guide.split("### Settings of the engine\n")[1].split("### ")[0].split("|---|---|\n")[1]
    listed = re.findall(r"`([a-z_]+)`", table.split("\n\n")[0])
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    assert sorted(listed) == sorted(known - {"model_dir", "disk_cache_dir", "backend_factory"})


def test_options_of_other_commands_are_not_spoken_of() -> None:
    """A profile has no rig and names no adapters, an engine names none either."""
    for command, strangers in (("profile", ("--rig", "--adapter ")), ("engine", ("--adapter ",))):
        shown = CliRunner(env={"COLUMNS": "500"}).invoke(app, ["bench", command, "--help"]).output
        assert "--adapters " in shown
        assert not [option for option in strangers if option in shown.replace("--adapter:", "--adapter ")]
    assert "exactly one of --model-dir and --shape" in usage_error("profile")


def test_a_place_for_a_checkpoint_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    """Of the script that measures loading."""
    command = [sys.executable, "-m", "benchmarks.weight_load", "--scratch", str(tmp_path / "missing")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "missing is no directory" in done.stderr
