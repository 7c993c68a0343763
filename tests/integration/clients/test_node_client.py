"""The Node client: the same protos, gRPC's default limits, the CLI's exit codes."""

import json
import os
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from lorikeet.inference.v1 import generation_pb2 as pb
from lorikeet_contract.status import StatusCode
from tests.support.fake_services import TOKEN, FakeServices, fake_services, service_error

NODE = Path(__file__).resolve().parents[3] / "clients" / "node"

pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(
        not (NODE / "node_modules" / "@grpc").exists(), reason="run `npm ci` in clients/node (make test does)"
    ),
]


@pytest.fixture
def fakes() -> Generator[FakeServices]:
    """The server."""
    with fake_services() as running:
        yield running


def run(address: str, *arguments: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """The client's own process."""
    env = {**os.environ, "LORIKEET_INFERENCE": address, "LORIKEET_TOKEN": token}
    return subprocess.run(
        ["node", "client.mjs", *arguments],
        cwd=NODE,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_streams_text(fakes: FakeServices) -> None:
    """Text on stdout, zero temperature kept, no adapter where none is named."""
    done = run(fakes.address, "--prompt", "one two", "--max-tokens", "5", "--keepalive-s", "10")
    assert (done.returncode, done.stdout) == (0, "onetwo\n"), done.stderr
    assert "[FINISH_REASON_LENGTH] 3 prompt + 2 output tokens" in done.stderr
    (request,) = fakes.inference.requests
    assert request.sampling == pb.SamplingParams(temperature=0, max_tokens=5)
    assert not request.HasField("adapter")


def test_messages(fakes: FakeServices) -> None:
    """With --json the messages' own fields, in order; the adapter that answered is named."""
    done = run(fakes.address, "--prompt", "one two", "--adapter", "a0", "--json")
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    assert [message["sequence"] for message in messages] == [0, 1, 2]
    assert messages[-1]["finish"]["adapter"]["tier_hit"] == "ADAPTER_TIER_HOST"
    assert fakes.inference.requests[0].adapter == "a0"


def test_a_reply_just_below_the_default_limit(fakes: FakeServices) -> None:
    """4 MiB less the frame arrives in a client that knows no options."""
    text = "x" * (4 * 1024 * 1024 - 100)
    finish = pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(), timings=pb.Timings())
    fakes.inference.script = lambda *_: iter([pb.GenerateResponse(text_delta=text, finish=finish)])
    done = run(fakes.address, "--prompt", "x")
    assert done.returncode == 0, done.stderr
    assert done.stdout == text + "\n"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (StatusCode.INVALID_ARGUMENT, 1),
        (StatusCode.NOT_FOUND, 3),
        (StatusCode.UNAVAILABLE, 4),
        (StatusCode.PERMISSION_DENIED, 5),
    ],
)
def test_statuses(fakes: FakeServices, code: StatusCode, exit_code: int) -> None:
    """The server's words and the CLI's codes."""
    fakes.faults.add("Generate", service_error(code, "what is wrong"))
    done = run(fakes.address, "--prompt", "x")
    assert (done.returncode, done.stderr) == (exit_code, "error: what is wrong\n")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-tokens", "99999999999"),
        ("--max-tokens", "5.5"),
        ("--max-tokens", "abc"),
        ("--max-tokens", ""),
        ("--temperature", "abc"),
        ("--temperature", "1e39"),
        ("--timeout-s", "abc"),
        ("--timeout-s", "Infinity"),
        ("--keepalive-s", "abc"),
        ("--keepalive-s", "0"),
    ],
)
def test_numbers_that_cannot_be(fakes: FakeServices, option: str, value: str) -> None:
    """Usage errors; nothing is sent."""
    done = run(fakes.address, "--prompt", "x", option, value)
    assert (done.returncode, f"{option}: '{value}' is not a number" in done.stderr) == (2, True), done.stderr
    assert not fakes.inference.requests


def test_a_very_long_timeout(fakes: FakeServices) -> None:
    """As good as none."""
    done = run(fakes.address, "--prompt", "one two", "--timeout-s", "1e12")
    assert (done.returncode, done.stdout) == (0, "onetwo\n"), done.stderr


@pytest.mark.parametrize("token", ["lk_one\nlk_two", "lk_one two", "lk_é"])
def test_a_token_that_no_header_can_carry(fakes: FakeServices, token: str) -> None:
    """Said without showing it."""
    done = run(fakes.address, "--prompt", "x", token=token)
    assert done.returncode == 1
    assert "LORIKEET_TOKEN has characters" in done.stderr
    assert "lk_" not in done.stderr


def test_addresses(fakes: FakeServices) -> None:
    """An empty one is the default; a broken one is an error, not a trace."""
    assert run("", "--prompt", "x", "--timeout-s", "2").returncode in {4, 5, 6}
    done = run("a\nb", "--prompt", "x")
    assert (done.returncode, done.stderr.count("    at ")) == (1, 0), done.stderr


def test_a_reader_that_leaves(fakes: FakeServices) -> None:
    """It ends quietly."""
    fakes.inference.script = lambda *_: (pb.GenerateResponse(text_delta="x" * 65536) for _ in range(200))
    env = {**os.environ, "LORIKEET_INFERENCE": fakes.address, "LORIKEET_TOKEN": TOKEN}
    command = ["node", "client.mjs", "--prompt", "x"]
    with subprocess.Popen(
        command, cwd=NODE, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as client:
        assert client.stdout
        assert client.stderr
        client.stdout.read(1)
        client.stdout.close()
        assert client.stderr.read() == b""
        assert client.wait(60) == 1


def test_other_ends(fakes: FakeServices) -> None:
    """No token, no input, no server."""
    assert run(fakes.address, "--prompt", "x", token="").returncode == 5
    assert run(fakes.address).returncode == 2
    assert run(fakes.address, "--nonsense").returncode == 2
    assert run("127.0.0.1:1", "--prompt", "x", "--timeout-s", "2").returncode in {4, 6}
