"""How both services read their settings: flags, environment, defaults, with errors that name each."""

from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsError

SettingsT = TypeVar("SettingsT", bound=BaseSettings)


class InvalidSettingsError(Exception):
    """A flag or variable is missing or wrong; the message names it and holds no value that was given."""


def read_service_settings(settings: type[SettingsT], arguments: Sequence[str]) -> SettingsT:
    """Read all settings once.

    Raises:
        InvalidSettingsError: something is missing or wrong.
        SystemExit: `--help`, or a flag that does not exist.
    """
    prefix = settings.model_config.get("env_prefix", "")
    try:
        return settings(_cli_parse_args=list(arguments))  # pyright: ignore[reportCallIssue]
    except ValidationError as error:
        lines = [_explain(prefix, e["loc"], e["msg"]) for e in error.errors(include_input=False)]
        raise InvalidSettingsError("\n".join(lines)) from error
    except SettingsError as error:
        raise InvalidSettingsError(str(error)) from error


def _explain(prefix: str, location: tuple[int | str, ...], message: str) -> str:
    message = message.removeprefix("Value error, ")
    if not location:
        return message
    name = str(location[0])
    return f"--{name.replace('_', '-')} ({prefix}{name.upper()}): {message}"
