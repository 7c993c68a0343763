"""The model authors' sampling defaults, from generation_config.json.

Used where the server runs with `--generation-config auto` (its default, as vLLM's); `none` leaves them out,
and a request's own values always win.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

_MAX_INTEGER = 2**31 - 1
# Logits times or divided by these stay far from float32's end.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3


class GenerationConfigError(ValueError):
    """generation_config.json is not what Hugging Face writes."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that leaves a field out gets. `max_tokens` None: what is left of the context."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @staticmethod
    def from_directory(model_dir: Path) -> "SamplingDefaults":
        """Read generation_config.json; without the file, or without a key in it, the defaults above hold.

        `do_sample: false`, written out, means greedy.
        """
        path = model_dir / "generation_config.json"
        if not path.is_file():
            return SamplingDefaults()
        try:
            return _read(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise GenerationConfigError(
                f"{path}: {error}; mend it, or start with --generation-config none"
            ) from error


def _read(config: object) -> SamplingDefaults:
    if not isinstance(config, dict):
        raise ValueError("holds no JSON object")  # noqa: TRY004 (what the file holds, not what was passed)
    fields = cast("dict[str, object]", config)
    greedy = fields.get("do_sample") is False
    # vLLM's -1 keeps all tokens, as 0 does.
    top_k = _integer(fields, "top_k", -1)
    return SamplingDefaults(
        temperature=0.0 if greedy else _number(fields, "temperature", 1.0, 0.0, 2.0),
        top_p=_number(fields, "top_p", 1.0, 1e-6, 1.0),
        top_k=0 if top_k is None else max(0, top_k),
        max_tokens=_integer(fields, "max_new_tokens", 1),
        min_p=_number(fields, "min_p", 0.0, 0.0, 1.0),
        repetition_penalty=_number(
            fields, "repetition_penalty", 1.0, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        ),
    )


def _number(fields: dict[str, object], key: str, default: float, low: float, high: float) -> float:
    value = fields.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}, which is no number")  # noqa: TRY004
    if not low <= value <= high:
        raise ValueError(f"{key} is {value!r}, which is outside [{low:g}, {high:g}]")
    return float(value)


def _integer(fields: dict[str, object], key: str, low: int) -> int | None:
    """Floats of a whole value count: transformers compares and slices with them all the same."""
    value = fields.get(key)
    if value is None:
        return None
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not is_whole or isinstance(value, bool) or not low <= cast("float", value) <= _MAX_INTEGER:
        raise ValueError(f"{key} is {value!r}, which is no integer in [{low}, {_MAX_INTEGER}]")
    return int(cast("float", value))
