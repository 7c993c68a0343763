"""What a composed service's command and environment mean to the program that it starts."""

import contextlib
import importlib
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

from lorikeet_rpc.service_settings import InvalidSettingsError

SETTINGS = {
    "inference_service.__main__:main": ("inference_service.settings", "INFERENCE_"),
    "adapter_manager.__main__:main": ("adapter_manager.settings", "ADAPTER_MANAGER_"),
}


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """Settings as the program's own code reads them, with what cannot be told from the values."""

    values: Any
    existing: Path

    def ports(self) -> dict[str, int]:
        """Ports that the service listens on, by setting."""
        addresses = {name: getattr(self.values, name) for name in ("listen", "metrics_listen")}
        return {name: int(value.rpartition(":")[2]) for name, value in addresses.items() if value}

    def directories(self) -> dict[str, str]:
        """Absolute directories that the service reads or writes, by setting."""
        found: dict[str, str] = {"data_dir": str(self.values.data_dir)}
        if model_dir := getattr(self.values, "model_dir", None):
            found["model_dir"] = str(model_dir)
        store = getattr(self.values, "store_url", None)
        if store and urlsplit(store).scheme == "file":
            found["store_url"] = urlsplit(store).path
        return {name: path.removeprefix(str(self.existing)) for name, path in found.items()}


def read(
    program: str, arguments: Sequence[str], environment: Mapping[str, str], existing: Path
) -> ReadSettings | str:
    """Read them by the program's own code; a text says what it refuses.

    Paths that settings demand to exist are taken to be below `existing`, which must hold them.
    """
    module_name, prefix = SETTINGS[program]
    module = importlib.import_module(module_name)
    fields = set(module.Settings.model_fields)
    unknown = [
        n for n in environment if n.startswith(prefix) and n.removeprefix(prefix).lower() not in fields
    ]
    if unknown:
        return f"{', '.join(unknown)}: no such setting"
    output = io.StringIO()
    arguments = [_below(existing, a) for a in arguments]
    ours = {n: _below(existing, v) for n, v in environment.items() if n.startswith(prefix)}
    with mock.patch.dict(os.environ, ours, clear=True), contextlib.redirect_stderr(output):
        try:
            return ReadSettings(module.read_settings(arguments), existing)
        except InvalidSettingsError as error:
            return str(error)
        except SystemExit:
            return output.getvalue().strip().splitlines()[-1]


def _below(existing: Path, text: str) -> str:
    """Absolute paths that are a value, or follow `=`, moved below `existing`; other text as it is."""
    return re.sub(r"(^|=)(/[\w./-]+)$", lambda m: f"{m[1]}{existing}{m[2]}", text)
