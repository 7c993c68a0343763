"""Flags and variables of the inference service."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from adapter_manager.settings import read_settings as read_manager_settings
from inference_service.engine.config import EngineConfig
from inference_service.settings import Settings, read_settings
from lorikeet_rpc.service_settings import InvalidSettingsError

# Fields of EngineConfig that are fixed here or named otherwise.
_RENAMED = {"arena_bytes": "adapter_arena_bytes", "disk_cache_dir": "data_dir", "log_json": "log_format"}
_FIXED = {"backend_factory", "load_retry_s"}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in [n for n in os.environ if n.startswith("INFERENCE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_flags_win_over_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """INFERENCE_MAX_RANK and --max-rank are the same setting."""
    monkeypatch.setenv("INFERENCE_MAX_RANK", "7")
    monkeypatch.setenv("INFERENCE_NODE_TOKEN", "s3cret")
    settings = read_settings(["--model-dir", str(tmp_path)])
    assert settings.max_rank == 7
    assert "s3cret" not in repr(settings)
    assert read_settings(["--model-dir", str(tmp_path), "--max-rank", "9"]).max_rank == 9


def test_static_tenants_are_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One object, tenant to token; a tenant's name is checked."""
    monkeypatch.setenv("INFERENCE_STATIC_TENANTS", '{"demo": "t0ken"}')
    settings = read_settings(["--model-dir", str(tmp_path)])
    assert settings.static_tenants["demo"].get_secret_value() == "t0ken"
    monkeypatch.setenv("INFERENCE_STATIC_TENANTS", '{"../x": "t"}')
    with pytest.raises(InvalidSettingsError, match="static_tenants"):
        read_settings(["--model-dir", str(tmp_path)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--model-dir"),
        (["--model-dir", "missing"], "--model-dir"),
        (["--model-dir", ".", "--max-rank", "0"], "INFERENCE_MAX_RANK"),
        (["--model-dir", ".", "--max-rank", "many"], "--max-rank"),
        (["--model-dir", ".", "--device", "tpu"], "--device"),
        (["--model-dir", ".", "--drain-grace-s", "nan"], "--drain-grace-s"),
        (["--model-dir", ".", "--tls-cert", "x.pem"], "--tls-cert"),
        (["--model-dir", ".", "--metrics-listen", "9401"], "--metrics-listen"),
        (["--model-dir", ".", "--num-blocks", "1", "--kv-cache-bytes", "1"], "give one"),
    ],
)
def test_mistakes_name_the_setting(arguments: list[str], words: str) -> None:
    """The error says which flag, and is no traceback."""
    with pytest.raises(InvalidSettingsError, match=words):
        read_settings(arguments)


def test_tls_files_go_together(tmp_path: Path) -> None:
    """A certificate without its key is refused."""
    (tmp_path / "c.pem").touch()
    (tmp_path / "k.pem").touch()
    base = ["--model-dir", ".", "--tls-cert", "c.pem"]
    with pytest.raises(InvalidSettingsError, match="go together"):
        read_settings(base)
    assert read_settings([*base, "--tls-key", "k.pem"]).tls is not None


def test_every_engine_setting_can_be_set() -> None:
    """No field of the engine's configuration is forgotten here."""
    for field in dataclasses.fields(EngineConfig):
        if field.name not in _FIXED:
            assert _RENAMED.get(field.name, field.name) in Settings.model_fields, field.name


def test_engine_config_carries_the_values(tmp_path: Path) -> None:
    """Paths become absolute, names map."""
    arguments = ["--model-dir", ".", "--device", "cpu", "--adapter-arena-bytes", "5", "--no-prefix-cache"]
    config = read_settings([*arguments, "--max-context-tokens", "99", "--data-dir", "d"]).engine_config()
    assert (config.arena_bytes, config.prefix_cache, config.max_context_tokens) == (5, False, 99)
    assert config.model_dir == str(tmp_path)
    assert config.disk_cache_dir == str(tmp_path / "d" / "adapters")


def test_settings_are_frozen() -> None:
    """Nothing changes them after start-up."""
    settings = read_settings(["--model-dir", "."])
    with pytest.raises(ValueError, match="frozen"):
        settings.max_rank = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_a_stalled_engine_is_given_a_cpus_time_unless_it_is_on_a_gpu() -> None:
    """`auto` is settled in the engine process, where torch is: it may be the CPU."""
    for device, stall_timeout_s in (("auto", 600.0), ("cpu", 600.0), ("cuda", 60.0)):
        config = read_settings(["--model-dir", ".", "--device", device]).engine_config()
        assert (config.device, config.stall_timeout_s) == (device, stall_timeout_s)


@pytest.mark.parametrize("read", [read_settings, read_manager_settings])
def test_help_is_in_plain_words(
    read: Callable[[list[str]], object], capsys: pytest.CaptureFixture[str]
) -> None:
    """No names of Python's types, no default that is nothing."""
    with pytest.raises(SystemExit) as ended:
        read(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "--node-token SECRET" in shown
    assert "(default: 30.0)" in shown
    for raw in ("SecretStr", "Path", "str]", "tuple", "None", "null", "factory", "(default: )"):
        assert raw not in shown, raw


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("8,1, 4", (1, 4, 8)), ("16", (16,)), ("none", ()), ("0", None), ("1,,2", None), ("two", None)],
)
@pytest.mark.parametrize("flag", ["graph-batch-sizes", "graph-token-counts"])
def test_graph_sizes(tmp_path: Path, flag: str, text: str, sizes: tuple[int, ...] | None) -> None:
    """Numbers with commas, in any order; anything else is named."""
    arguments = ["--model-dir", str(tmp_path), f"--{flag}", text, "--no-cuda-graphs"]
    if sizes is None:
        with pytest.raises(InvalidSettingsError, match=f"--{flag}"):
            read_settings(arguments)
        return
    config = read_settings(arguments).engine_config()
    assert getattr(config, flag.replace("-", "_")) == sizes
    assert not config.cuda_graphs
    assert config.overlap is None
