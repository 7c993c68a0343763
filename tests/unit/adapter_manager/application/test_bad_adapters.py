"""The fixtures that must be refused, or must do no harm: with their reason, at once, in bounded memory."""

import json
import shutil
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from adapter_manager.domain.errors import InvalidAdapterError
from lorikeet_contract.status import StatusCode
from tests.support.adapter_directories import ingest
from tests.support.lora_schemas import FIXTURES, SCHEMAS

CASES: dict[str, dict[str, Any]] = {
    case["name"]: case for case in json.loads((FIXTURES / "manifest.json").read_text())["rejects"]
}
LINKS = {
    "symlink-weights": ("adapter_model.safetensors", "/etc/hostname"),
    "symlink-config": ("adapter_config.json", "/etc/passwd"),
}
MARKER = Path("/tmp/LORA_FIXTURE_PICKLE_WAS_EXECUTED")
# What the refusal must name.
WORDS = {
    "st-truncated-data": "cut short", "st-truncated-header": "cut short", "st-empty-file": "empty",
    "st-header-length-2e40": "cut short", "st-header-not-json": "JSON", "st-offset-past-end": "data_offsets",
    "st-overlapping-offsets": "shares bytes", "st-shape-vs-bytes": "takes 512 bytes",
    "st-shape-overflow": "overflows", "st-unknown-dtype": "F7", "st-duplicate-key": "twice",
    "st-no-tensors": "no tensors", "nan-weights": "NaN or infinity", "inf-weights": "NaN or infinity",
    "wrong-out-dim": "expected [64, rank]", "wrong-in-dim": "expected [rank, 64]",
    "rank-a-vs-b": "lora_A has rank 4, lora_B has rank 1", "rank-vs-config": "rank 4 by adapter_config.json",
    "missing-lora-b": "no lora_B", "unknown-layer": "layers.99", "unknown-module": "match nothing",
    "undeclared-full-weight": "model.norm.weight", "int-dtype": "I32",
    "fused-rows-not-multiple": "8 experts * rank", "fused-too-few-experts": "8 experts * rank",
    "expert-index-out-of-range": "expert 8", "wrong-base-model": "expected",
    "config-missing": "adapter_config.json is missing", "config-not-json": "not JSON",
    "config-empty-object": "peft_type", "config-deep-nesting": "nested", "config-r-huge": "r 1000000000",
    "config-r-zero": "r 0", "config-r-negative": "r -8", "config-r-string": "r '8'",
    "config-alpha-nan": "lora_alpha nan", "config-alpha-infinity": "lora_alpha inf",
    "config-alpha-1e300": "lora_alpha 1e+300", "config-rank-pattern-huge": "rank_pattern",
    "config-peft-type-ia3": "IA3", "config-pissa-init": "pissa",
    "config-layer-replication": "layer_replication",
    "config-alora": "alora_invocation_tokens", "config-dora-without-magnitude": "use_dora",
    "config-modules-to-save-missing": "modules_to_save", "pickle-bin-payload": "pickle",
    "pickle-torch-zip-payload": "pickle", "pickle-bin-plain": "pickle",
    "weights-missing": "adapter_model.safetensors is missing", "symlink-weights": "symbolic link",
    "symlink-config": "symbolic link", "directory-as-weights": "not a regular file",
    "index-traversal": "missing", "evil-tensor-names": "tensor named",
}  # fmt: skip
LOADED = sorted(CASES.keys() - WORDS.keys())


def test_every_case_has_its_expectation() -> None:
    """What must be refused has words here; what must load has none."""
    assert {n for n, c in CASES.items() if c["expect"] == "reject"} <= WORDS.keys() <= CASES.keys()
    assert {n for n, c in CASES.items() if c["expect"] == "load"} <= set(LOADED)


@pytest.fixture
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the case named by the parameter, with the link that is not stored."""
    name = request.param
    copy = tmp_path / "adapter"
    shutil.copytree(FIXTURES / "adapters_bad" / name, copy)
    if name in LINKS:
        link, target = LINKS[name]
        (copy / link).symlink_to(target)
    return copy


@pytest.mark.parametrize(("directory", "name"), [(n, n) for n in WORDS], indirect=["directory"])
def test_refused_with_its_reason(directory: Path, name: str, tmp_path: Path) -> None:
    """INVALID_ARGUMENT, the reason in words, nothing raw of the upload, no payload, no time, no memory."""
    started = time.perf_counter()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidAdapterError) as caught:
            ingest(directory, SCHEMAS["qwen3_moe"](), tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    error = caught.value
    assert error.code is StatusCode.INVALID_ARGUMENT
    assert WORDS[name] in error.message
    assert error.message.isascii()
    assert error.message.isprintable()
    assert len(error.message) < 2500
    assert "root:" not in error.message
    assert time.perf_counter() - started < 2
    assert peak < 32 << 20
    assert not (tmp_path / "payload").exists()
    assert not MARKER.exists()


@pytest.mark.parametrize("directory", LOADED, indirect=True)
def test_loaded_as_the_adapter_that_it_is(directory: Path, tmp_path: Path) -> None:
    """The same revision as attn-r1, whatever else the directory holds or the configuration says."""
    schema = SCHEMAS["qwen3_moe"]()
    expected, _ = ingest(FIXTURES / "adapters" / "qwen3_moe" / "attn-r1", schema, tmp_path)
    started = time.perf_counter()
    built, _ = ingest(directory, schema, tmp_path)
    assert time.perf_counter() - started < 2
    assert built.digest == expected.digest
    assert not MARKER.exists()


def test_other_base_model_is_named_in_a_warning(tmp_path: Path) -> None:
    """A name alone is no reason to refuse: shapes and digests are what counts."""
    directory = FIXTURES / "adapters_bad" / "wrong-base-name-only"
    built, _ = ingest(directory, SCHEMAS["qwen3_moe"](), tmp_path, model_name="tiny-random/qwen3_moe")
    assert "Llama-3.3-70B" in built.report.warnings[0]
