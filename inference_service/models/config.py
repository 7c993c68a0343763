"""Reading config.json and generation_config.json, field by field, with errors that name the field."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from inference_service.models.errors import ModelConfigError

# What sizes and ids are computed in, on the device and on the wire.
_MAX_INTEGER = 2**31 - 1
# What parameters are computed in: a number beyond it would be read as infinity, or one too small as zero.
_MIN_NUMBER, _MAX_NUMBER = 2.0**-126, (2 - 2.0**-23) * 2.0**127


class ConfigReader:
    """A JSON object with typed getters. A default applies where the field is absent or null."""

    def __init__(self, where: str, fields: dict[str, Any]) -> None:
        self.where = where
        self.fields = fields

    def fail(self, name: str, wanted: str) -> ModelConfigError:
        """An error about a field's value."""
        if self.fields.get(name) is None:
            return ModelConfigError(f"{self.where}: {name} is missing; expected {wanted}")
        return ModelConfigError(f"{self.where}: {name} is {self.fields[name]!r}; expected {wanted}")

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer of at least `minimum`, below 2**31."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.fail(name, f"an integer of at least {minimum}")
        if value > _MAX_INTEGER:
            raise self.fail(name, f"an integer of at most {_MAX_INTEGER}")
        return value

    def optional_integer(self, name: str) -> int | None:
        """A positive integer, or None where absent or null."""
        return None if self.fields.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number, finite in float32."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.fail(name, "a positive number")
        if not _MIN_NUMBER <= value <= _MAX_NUMBER:
            raise self.fail(name, f"a number between {_MIN_NUMBER:.2g} and {_MAX_NUMBER:.2g}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A positive number, or None where absent or null."""
        return None if self.fields.get(name) is None else self.number(name)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.fail(name, "a string")
        return value

    def integers(self, name: str, default: Sequence[int] | None = None) -> tuple[int, ...]:
        """A list of integers; a single one counts as a list."""
        value = self._value(name, default)
        values = [value] if isinstance(value, int) else value
        if not isinstance(values, list | tuple):
            raise self.fail(name, "a list of integers")
        items = cast("Sequence[object]", values)
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in items):
            raise self.fail(name, "a list of integers")
        integers = tuple(cast("Sequence[int]", items))
        if any(abs(v) > _MAX_INTEGER for v in integers):
            raise self.fail(name, f"integers of at most {_MAX_INTEGER}")
        return integers

    def texts(self, name: str, default: Sequence[str] | None = None) -> tuple[str, ...]:
        """A list of strings; a single one counts as a list."""
        value = self._value(name, default)
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list | tuple):
            raise self.fail(name, "a list of strings")
        items = cast("Sequence[object]", values)
        if not all(isinstance(v, str) for v in items):
            raise self.fail(name, "a list of strings")
        return tuple(cast("Sequence[str]", items))

    def section(self, name: str) -> "ConfigReader | None":
        """A nested object, or None where absent or null."""
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, "an object")
        return ConfigReader(f"{self.where}: {name}", cast("dict[str, Any]", value))

    def require(self, name: str, allowed: Sequence[object], default: object) -> None:
        """Refuse a field whose value this server does not implement."""
        value = self.fields.get(name)
        value = default if value is None else value
        if value not in allowed:
            raise ModelConfigError(
                f"{self.where}: {name} is {value!r}; this server supports "
                f"{', '.join(repr(a) for a in allowed)}"
            )

    def _value(self, name: str, default: object) -> object:
        value = self.fields.get(name)
        return default if value is None else value


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the engine takes from generation_config.json; sampling is the front end's (SamplingDefaults)."""

    eos_token_ids: tuple[int, ...]


def read_config(model_dir: Path) -> ConfigReader:
    """The model's config.json."""
    return ConfigReader(str(model_dir / "config.json"), _read_object(model_dir / "config.json"))


def read_generation_defaults(model_dir: Path, config: ConfigReader) -> GenerationDefaults:
    """generation_config.json where there is one; its end-of-sequence tokens win over config.json's."""
    path = model_dir / "generation_config.json"
    reader = ConfigReader(str(path), _read_object(path) if path.exists() else {})
    eos = reader.integers("eos_token_id", ()) or config.integers("eos_token_id", ())
    return GenerationDefaults(eos)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelConfigError(
            f"{path} does not exist; the model directory must be a Hugging Face one"
        ) from None
    except OSError as error:
        raise ModelConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path} holds no JSON object")
    return cast("dict[str, Any]", value)
