"""`lorikeet bench` on a GPU: tokens judged through graphs, and a profile of kernels."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def bench(root: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run a command: exit code, its JSON, what it printed."""
    result = root / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "lorikeet_admin", "bench", *arguments, "--device", "cuda", "--json", result],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.exists(), done.stderr + done.stdout
    return done.returncode, json.loads(result.read_text()), done.stdout + done.stderr


def test_every_token_is_right_and_nothing_is_compiled_after_ready(tmp_path: Path) -> None:
    """The rig's forced tokens at several batch sizes; the probe sees the layers that graphs hide."""
    code, result, printed = bench(
        tmp_path,
        *("engine", "--rig", "--concurrency", "1,5,16", "--adapters", "0,8", "--base-share", "0.2"),
        *("--input-tokens", "8:300", "--output-tokens", "20:60", "--probe-steps", "3"),
    )
    assert code == 0, printed
    assert [point["wrong"] for point in result["points"]] == [0] * 6
    assert all(point["checked_tokens"] > 0 for point in result["points"])
    assert all(point["routing"]["experts"] >= 2 for point in result["points"])
    assert result["servers"][0]["compilations"] == 0


def test_a_node_answers_with_the_right_revision(tmp_path: Path) -> None:
    """Over gRPC, token by token."""
    code, result, printed = bench(
        tmp_path,
        *("serve", "--rig", "--concurrency", "8", "--adapters", "8", "--input-tokens", "8:300"),
        *("--output-tokens", "20:60", "--probe-steps", "0"),
    )
    assert code == 0, printed
    assert result["points"][0]["checked_tokens"] > 0


def test_a_profile_names_the_kernels(tmp_path: Path) -> None:
    """Kernels inside replayed graphs, their parts and the gaps."""
    tiny = ("num_hidden_layers=2", 'layer_types=["sliding_attention","full_attention"]')
    code, result, printed = bench(
        tmp_path,
        *("profile", "--shape", "gpt-oss-20b", "--shape-set", tiny[0], "--shape-set", tiny[1]),
        *("--concurrency", "4", "--adapters", "0,2", "--input-tokens", "64", "--steps", "5"),
    )
    assert code == 0, printed
    (base, with_adapters) = result["profiles"]
    assert not [op for op in base["profile"]["ops"] if op["part"] == "adapters"]
    seen = {part["part"] for part in with_adapters["parts"] if part["us"] and part["floor_us"]}
    assert seen == {"experts", "projections, router", "lm_head", "attention", "adapters"}
    profile = with_adapters["profile"]
    assert (profile["rows"], profile["adapters"], profile["steps"]) == (4, 2, 5)
    names = " ".join(op["name"] for op in profile["ops"])
    assert "mxfp4" in names
    assert "lora" in names
    assert profile["busy_us"] > 0
    assert profile["gap_us"] >= 0
