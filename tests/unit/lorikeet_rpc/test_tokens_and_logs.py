"""Tokens, log lines and addresses."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from lorikeet_rpc import logs, tokens
from lorikeet_rpc.server import is_loopback


@pytest.fixture
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_tokens_differ_and_hash_to_their_record() -> None:
    """A token's id and hash follow from the token alone."""
    one, two = tokens.new_token(), tokens.new_token()
    assert one.token != two.token
    assert tokens.hash_token(one.token) == one.sha256
    assert tokens.token_id_of(one.sha256) == one.token_id
    assert one.token_id not in one.token


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [("a", "a", True), ("a", "b", False), (None, "a", False), ("", "", False), (None, "", False)],
)
def test_same_token(given: str | None, expected: str, same: bool) -> None:
    """No secret configured means that nobody matches it."""
    assert tokens.same_token(given, expected) is same


@pytest.mark.usefixtures("_restore_logging")
@pytest.mark.parametrize("as_json", [True, False])
def test_control_characters_cannot_forge_a_line(capfd: pytest.CaptureFixture[str], as_json: bool) -> None:
    """Line feeds, terminal escapes and text-direction marks from outside are shown, not obeyed."""
    logs.configure_logging(json=as_json)
    structlog.get_logger().info("request.rejected", name="a\nb\x1b[31m\u202ec\x85d")
    logging.getLogger("grpc").warning("line\r\nbreak")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert not any(c in "".join(lines) for c in "\u202e\x85\r")
    assert "\\u000a" in lines[0]


@pytest.mark.usefixtures("_restore_logging")
def test_json_lines_parse_and_values_are_bounded(capfd: pytest.CaptureFixture[str]) -> None:
    """One JSON object a line, long values cut."""
    logs.configure_logging(json=True)
    structlog.get_logger().info("x.happened", value="y" * 100_000, count=3)
    record = json.loads(capfd.readouterr().err)
    assert record["event"] == "x.happened"
    assert record["count"] == 3
    assert len(record["value"]) < 2100


@pytest.mark.usefixtures("_restore_logging")
def test_a_client_that_vanishes_is_no_error_of_ours(capfd: pytest.CaptureFixture[str]) -> None:
    """Only grpc's line about it is left out."""
    logs.configure_logging(json=True)
    grpc_log = logging.getLogger("grpc._cython.cygrpc")
    grpc_log.error("ExecuteBatchError raised in core by servicer method [%s]", "/a.B/C")
    grpc_log.error("Unexpected [%s] raised by servicer method [%s]", "E", "/a.B/C")
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["event"] == "Unexpected [E] raised by servicer method [/a.B/C]"


def test_lines_of_two_processes_do_not_mix(tmp_path: Path) -> None:
    """Front end and engine share one file: every line stays one event of one of them."""
    program = (
        "import structlog, sys; from lorikeet_rpc import logs; logs.configure_logging(json=True)\n"
        "for n in range(2000): structlog.get_logger().info('a.b', who=sys.argv[1], n=n)\n"
    )
    with (tmp_path / "log").open("ab") as log:
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", program, who],
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
            for who in ("front", "engine")
        ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    events = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    for who in ("front", "engine"):
        assert [event["n"] for event in events if event["who"] == who] == list(range(2000))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/tmp/x", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        (":50051", False),
        ("*:1", False),
        ("example.com:1", False),
        ("localhost.evil.example:1", False),
    ],
)
def test_is_loopback(address: str, expected: bool) -> None:
    """Anything not surely local counts as reachable."""
    assert is_loopback(address) is expected
