"""How both services read their settings: flags, environment, defaults, with errors that name each."""

import argparse
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

SettingsT = TypeVar("SettingsT", bound=BaseSettings)

# What `--help` calls the values of each type.
_METAVARS = {
    "str": "TEXT",
    "Path": "PATH",
    "SecretStr": "SECRET",
    "int": "N",
    "float": "X",
    "tuple[str,...]": "A,B",
    "dict[str,SecretStr]": "JSON",
}
# A default that is nothing, and is better not mentioned.
_NO_DEFAULT = re.compile(r" ?\(default(: (null|None|\(\)|\{\}|)| factory: .*)\)$")


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
        # The source holds the arguments as parsed; it exits by itself where they cannot be.
        source = CliSettingsSource[argparse.ArgumentParser](
            settings, cli_parse_args=list(arguments), add_argument_method=_add_argument
        )
        return settings(_cli_settings_source=source)  # pyright: ignore[reportCallIssue]
    except ValidationError as error:
        lines = [_explain(prefix, e["loc"], e["msg"]) for e in error.errors(include_input=False)]
        raise InvalidSettingsError("\n".join(lines)) from error
    except SettingsError as error:
        raise InvalidSettingsError(str(error)) from error


def _add_argument(container: Any, *names: str, **options: Any) -> argparse.Action:
    if (metavar := options.get("metavar")) in _METAVARS:
        options["metavar"] = _METAVARS[metavar]
    options["help"] = _NO_DEFAULT.sub("", options.get("help") or "")
    return container.add_argument(*names, **options)


def _explain(prefix: str, location: tuple[int | str, ...], message: str) -> str:
    message = message.removeprefix("Value error, ")
    if not location:
        return message
    name = str(location[0])
    return f"--{name.replace('_', '-')} ({prefix}{name.upper()}): {message}"
