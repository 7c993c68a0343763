"""generation_config.json as defaults."""

import json
from pathlib import Path
from typing import Any

import pytest

from inference_service.text.sampling_defaults import GenerationConfigError, SamplingDefaults


def _read(directory: Path, config: Any) -> SamplingDefaults:
    (directory / "generation_config.json").write_text(json.dumps(config))
    return SamplingDefaults.from_directory(directory)


def test_without_a_file(tmp_path: Path) -> None:
    """The documented defaults hold."""
    assert SamplingDefaults.from_directory(tmp_path) == SamplingDefaults(1.0, 1.0, 0, None)


def test_values_and_gaps(tmp_path: Path) -> None:
    """What is written counts, what is not keeps its default; null is not written."""
    config = {"temperature": 0.6, "top_p": None, "top_k": 20, "do_sample": True, "max_new_tokens": 64}
    assert _read(tmp_path, config) == SamplingDefaults(0.6, 1.0, 20, 64)


def test_do_sample_false_is_greedy(tmp_path: Path) -> None:
    """Only an explicit false: Hugging Face leaves the key out where it was not chosen."""
    assert _read(tmp_path, {"do_sample": False, "temperature": 0.7}).temperature == 0.0
    assert _read(tmp_path, {"temperature": 0.7}).temperature == 0.7


@pytest.mark.parametrize(
    "config", [[], {"temperature": "hot"}, {"temperature": -1}, {"top_p": 0}, {"top_k": "many"}]
)
def test_nonsense_stops_the_start(tmp_path: Path, config: Any) -> None:
    """The error names the file and the way around it."""
    with pytest.raises(GenerationConfigError, match="--generation-config none"):
        _read(tmp_path, config)
