"""The C++ client: built from the same protos by the distribution's gRPC, run against the real stack."""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from lorikeet.inference.v1 import generation_pb2, inference_service_pb2_grpc
from lorikeet_bench import rigs
from lorikeet_rpc.server import RpcServer, TlsFiles
from tests.support.certificates import write_certificates
from tests.support.stack import Stack

SOURCE = Path(__file__).resolve().parents[3] / "clients" / "cpp"


def missing() -> str:
    """What the machine lacks for building it; empty for nothing."""
    programs = [
        p for p in ("cmake", "c++", "protoc", "grpc_cpp_plugin", "pkg-config") if shutil.which(p) is None
    ]
    if programs:
        return f"needs {', '.join(programs)}"
    found = subprocess.run(["pkg-config", "--exists", "grpc++", "protobuf"], check=False)
    return "" if found.returncode == 0 else "needs the headers of gRPC (Debian: libgrpc++-dev)"


pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),  # the build, on a loaded machine
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


@dataclass(frozen=True, slots=True)
class Client:
    """The program, and the stack that it speaks to."""

    program: Path
    stack: Stack

    async def start(self, *arguments: str, **environment: str) -> asyncio.subprocess.Process:
        """Start it."""
        return await asyncio.create_subprocess_exec(
            self.program,
            *arguments,
            env={
                **os.environ,
                "LORIKEET_INFERENCE": self.stack.node_address,
                "LORIKEET_TOKEN": self.stack.token,
                **environment,
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, *arguments: str, **environment: str) -> tuple[int | None, str, str]:
        """Exit code, text, and what it says beside."""
        process = await self.start(*arguments, **environment)
        out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()

    async def at_rest(self) -> None:
        """Wait until the node runs nothing for us any more."""
        for _ in range(200):
            status = await self.stack.status()
            if (status.running_requests, status.waiting_requests, status.adapter_leases) == (0, 0, 0):
                return
            await asyncio.sleep(0.05)
        raise AssertionError("still running")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as the guide says."""
    build = tmp_path_factory.mktemp("cpp")
    for command in (["cmake", "-S", SOURCE, "-B", build], ["cmake", "--build", build, "--parallel", "2"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning:" not in done.stderr
    return build / "lorikeet-generate"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(program: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    """Over the copy base, with one watermark."""
    root = tmp_path_factory.mktemp("cpp-stack")
    async with Stack(rigs.write_copy_base(root / "base"), root / "stack") as stack:
        await stack.upload(rigs.write_moe_watermark(root / "plus", ord("+")), "demo/plus")
        await stack.wait_known("demo/plus")
        yield Client(program, stack)


async def test_streams_text(client: Client) -> None:
    """The same text as another client gets, of the base and of an adapter, by prompt and by chat."""
    for adapter in (None, "demo/plus"):
        want = (await client.stack.generate("!5", adapter=adapter, max_tokens=4)).text
        assert len(want) == 4
        named = ("--adapter", adapter) if adapter else ()
        for way in ("--prompt", "--chat"):
            code, out, err = await client.run(way, "!5", *named, "--max-tokens", "4")
            assert (code, out) == (0, f"{want}\n"), err
            assert "[FINISH_REASON_LENGTH] 2 prompt + 4 output tokens" in err


async def test_cancelling_stops_the_work(client: Client) -> None:
    """After so many tokens, or by Ctrl-C: the client ends, and so does the node's work."""
    many = ("--prompt", "!", "--adapter", "demo/plus", "--max-tokens", "8000")
    before = (await client.stack.status()).steps
    code, out, err = await client.run(*many, "--cancel-after", "3")
    assert (code, out[:3]) == (0, "+++"), err
    assert "cancelled after" in err
    await client.at_rest()
    assert (await client.stack.status()).steps - before < 8000
    process = await client.start(*many)
    assert process.stdout
    await process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert process.returncode == 130
    await client.at_rest()


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "words"),
    [
        (["--prompt", "!", "--adapter", "demo/none"], {}, 3, "no adapter"),
        (["--prompt", "!", "--adapter", ""], {}, 1, "adapter"),
        (["--prompt", "!"], {"LORIKEET_INFERENCE": "127.0.0.1:1"}, 4, "error:"),
        (["--prompt", "!"], {"LORIKEET_TOKEN": "lk_wrong"}, 5, "token"),
        (["--prompt", "!"], {"LORIKEET_TOKEN": ""}, 5, "token"),
        (["--prompt", "!", "--max-tokens", "8000", "--timeout-s", "0.05"], {}, 6, "error:"),
        (["--prompt", "!"], {"LORIKEET_TLS_CA_FILE": "missing.pem"}, 1, "missing.pem"),
        (["--prompt", "!"], {"LORIKEET_TOKEN": "lk_one\nlk_two"}, 1, "LORIKEET_TOKEN has characters"),
        (["--prompt", "!"], {"LORIKEET_TOKEN": "lk_é"}, 1, "LORIKEET_TOKEN has characters"),
        (["--prompt", "!", "--adapter", "demo/a\nb"], {}, 2, "--adapter"),
        ([], {}, 2, "--prompt"),
        (["--prompt", "!", "--chat", "!"], {}, 2, "--prompt"),
        (["--prompt"], {}, 2, "value"),
        (["--nonsense", "1"], {}, 2, "--nonsense"),
        (["--prompt", "!", "--max-tokens", "5x"], {}, 2, "max-tokens"),
        (["--prompt", "!", "--max-tokens", "-1"], {}, 2, "max-tokens"),
        (["--prompt", "!", "--max-tokens", "5000000000"], {}, 2, "max-tokens"),
    ],
)
async def test_other_ends(
    client: Client, arguments: list[str], environment: dict[str, str], code: int, words: str
) -> None:
    """The command's exit codes, and the server's own words."""
    found, _, err = await client.run(*arguments, **environment)
    assert found == code, err
    assert words in err
    assert "lk_" not in err
    await client.at_rest()


async def test_tls(client: Client, tmp_path: Path) -> None:
    """With an authority the client speaks TLS; with another one it does not speak at all."""

    class Word(inference_service_pb2_grpc.InferenceServiceServicer):
        async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
            finish = generation_pb2.Finish(reason=generation_pb2.FINISH_REASON_LENGTH)
            yield generation_pb2.GenerateResponse(text_delta="word", finish=finish)

        Complete = Abort = Tokenize = GetModel = None  # type: ignore[assignment]

    ours, others = (write_certificates(tmp_path / name) for name in ("ours", "others"))
    files = TlsFiles(ours / "cert.pem", ours / "key.pem")
    server = RpcServer("127.0.0.1:0", tls=files, interceptors=[], service_names=[])
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(Word(), server.server)
    address = f"localhost:{await server.start()}"
    try:
        for directory, code in ((ours, 0), (others, 4)):
            environment = {"LORIKEET_INFERENCE": address, "LORIKEET_TLS_CA_FILE": str(directory / "ca.pem")}
            found, out, err = await client.run("--prompt", "!", **environment)
            assert (found, out) == (code, "word\n" if code == 0 else "\n"), err
    finally:
        await server.server.stop(None)
