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


def test_repetition_penalty_and_min_p(tmp_path: Path) -> None:
    """The other two that vLLM takes."""
    read = _read(tmp_path, {"repetition_penalty": 1.1, "min_p": 0.05})
    assert (read.repetition_penalty, read.min_p) == (1.1, 0.05)


def test_do_sample_false_is_greedy(tmp_path: Path) -> None:
    """Only an explicit false: Hugging Face leaves the key out where it was not chosen."""
    assert _read(tmp_path, {"do_sample": False, "temperature": 0.7}).temperature == 0.0
    assert _read(tmp_path, {"temperature": 0.7}).temperature == 0.7


def test_whole_floats_and_minus_one(tmp_path: Path) -> None:
    """Tools write 20.0 where they mean 20, and vLLM's users -1 where all tokens are kept."""
    defaults = _read(tmp_path, {"top_k": 20.0, "max_new_tokens": 6.0})
    assert (defaults.top_k, defaults.max_tokens) == (20, 6)
    assert isinstance(defaults.top_k, int)
    assert isinstance(defaults.max_tokens, int)
    assert _read(tmp_path, {"top_k": -1, "max_new_tokens": None}) == SamplingDefaults()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", ("hot", -1, True, "0.5", float("nan"), 10**400, [1])),
        ("top_p", (0, 1.5, float("inf"))),
        ("min_p", (-0.1, 1.5, "none")),
        ("repetition_penalty", (0, -1.0, 1001, float("nan"), True)),
        ("top_k", ("many", 1.5, -2, True, float("inf"), float("nan"), 10**30)),
        ("max_new_tokens", ("abc", 6.5, True, 0, -5, [], {}, float("inf"), 10**30)),
    ],
)
def test_nonsense_stops_the_start(tmp_path: Path, field: str, values: tuple[object, ...]) -> None:
    """The error names the file, the field, its value and the way around it."""
    for value in values:
        with pytest.raises(GenerationConfigError) as caught:
            _read(tmp_path, {field: value})
        assert f"generation_config.json: {field} is {value!r}, which is" in str(caught.value)
        assert "--generation-config none" in str(caught.value)


def test_no_object_stops_the_start(tmp_path: Path) -> None:
    """Nor does a list describe anything."""
    with pytest.raises(GenerationConfigError, match="holds no JSON object; mend it"):
        _read(tmp_path, [])
