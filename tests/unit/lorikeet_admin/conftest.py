"""A command line against the fake services."""

from collections.abc import Generator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lorikeet_admin.app import app
from tests.support.command_line import Run
from tests.support.fake_services import TOKEN, FakeServices, fake_services


@pytest.fixture
def fakes() -> Generator[FakeServices]:
    """The server."""
    with fake_services() as running:
        yield running


@pytest.fixture
def run(fakes: FakeServices) -> Run:
    """Run a command line against it."""
    env = {"LORIKEET_INFERENCE": fakes.address, "LORIKEET_MANAGER": fakes.address, "LORIKEET_TOKEN": TOKEN}

    def invoke(*arguments: str, stdin: str = "", **extra: str) -> Result:
        return CliRunner(env={**env, "COLUMNS": "200", **extra}).invoke(app, arguments, input=stdin)

    return invoke


@pytest.fixture
def adapter_dir(tmp_path: Path) -> Path:
    """A directory that looks like an adapter."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"w" * 3000)
    return tmp_path
