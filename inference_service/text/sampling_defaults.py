"""The model authors' sampling defaults, from generation_config.json.

Used where the server runs with `--generation-config auto` (its default, as vLLM's); `none` leaves them out,
and a request's own values always win.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class GenerationConfigError(ValueError):
    """generation_config.json is not what Hugging Face writes."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that leaves a field out gets. `max_tokens` None: what is left of the context."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None

    @staticmethod
    def from_directory(model_dir: Path) -> "SamplingDefaults":
        """Read generation_config.json; without the file, or without a key in it, the defaults above hold.

        `do_sample: false`, written out, means greedy.
        """
        path = model_dir / "generation_config.json"
        if not path.is_file():
            return SamplingDefaults()
        try:
            config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            greedy = config.get("do_sample") is False
            return SamplingDefaults(
                temperature=0.0 if greedy else _number(config, "temperature", 1.0, 0.0, 2.0),
                top_p=_number(config, "top_p", 1.0, 1e-6, 1.0),
                top_k=max(0, int(config.get("top_k") or 0)),
                max_tokens=config.get("max_new_tokens"),
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise GenerationConfigError(
                f"{path}: {error}; mend it, or start with --generation-config none"
            ) from error


def _number(config: dict[str, Any], key: str, default: float, low: float, high: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if not low <= float(value) <= high:
        raise ValueError(f"{key} is {value!r}, which is outside [{low:g}, {high:g}]")
    return float(value)
