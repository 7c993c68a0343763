"""Settings from flags and environment, and what a wrong one says."""

import pytest

from adapter_manager.settings import Settings, read_settings
from lorikeet_rpc.service_settings import InvalidSettingsError


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """And lists are separated by commas in both."""
    monkeypatch.setenv("ADAPTER_MANAGER_NODES", "a:1, b:2")
    monkeypatch.setenv("ADAPTER_MANAGER_LISTEN", "127.0.0.1:1")
    assert read_settings([]).nodes == ("a:1", "b:2")
    settings = read_settings(["--nodes", "c:3", "--insecure-listen"])
    assert (settings.nodes, settings.listen, settings.insecure_listen) == (("c:3",), "127.0.0.1:1", True)


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the settings' text nor in an error about them."""
    monkeypatch.setenv("ADAPTER_MANAGER_NODE_TOKEN", "hush-node")
    assert "hush" not in repr(read_settings(["--redis-url", "redis://user:hush@host"]))
    with pytest.raises(InvalidSettingsError) as caught:
        read_settings(["--redis-url", "hush"])
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "here"], ["--nodes", "ADAPTER_MANAGER_NODES", "host:port"]),
        (["--nodes", "a:1,a:1"], ["twice"]),
        (["--tls-cert", "x.pem"], ["--tls-key"]),
        (["--tls-client-ca", "x.pem"], ["--tls-cert"]),
        (["--max-adapters", "0"], ["--max-adapters", "greater than 0"]),
        (["--redis-url", "host:6379"], ["--redis-url", "redis://"]),
        (["--log-level", "loud"], ["--log-level"]),
        (["--metrics-listen", "here:"], ["--metrics-listen", "host:port"]),
    ],
)
def test_a_wrong_setting_names_itself(arguments: list[str], words: list[str]) -> None:
    """Flag, variable and what to give."""
    with pytest.raises(InvalidSettingsError) as caught:
        read_settings(arguments)
    for word in words:
        assert word in str(caught.value)


def test_every_setting_is_described() -> None:
    """`--help` explains each."""
    assert all(field.description for field in Settings.model_fields.values())


def test_redis_url_has_a_plain_variable_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """REDIS_URL, then the service's own variable, then the flag, each winning over the one before."""

    def url(*flags: str) -> str:
        found = read_settings(["--nodes", "127.0.0.1:1", *flags]).redis_url
        assert found is not None
        return found.get_secret_value()

    monkeypatch.setenv("REDIS_URL", "redis://one:1/0")
    assert url() == "redis://one:1/0"
    monkeypatch.setenv("ADAPTER_MANAGER_REDIS_URL", "redis://two:2/0")
    assert url() == "redis://two:2/0"
    assert url("--redis-url", "redis://three:3/0") == "redis://three:3/0"
