"""What docs/clients.md shows is true: its snippets run as they stand, against a real stack."""

import asyncio
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.support.stack import Stack

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]
ROOT = Path(__file__).resolve().parents[3]
STORYTELLER = ROOT / "examples" / "storyteller"
GUIDE = (ROOT / "docs" / "clients.md").read_text()


def blocks(heading: str, language: str) -> list[str]:
    """The code of one section."""
    section = re.split(r"^## ", GUIDE, flags=re.MULTILINE)
    (found,) = [text for text in section if text.startswith(heading)]
    return re.findall(rf"```{language}\n(.*?)```", found, re.DOTALL)


def commands(block: str) -> list[str]:
    """The lines of a shell block, continued ones joined."""
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """The storyteller with the adapter that the guide speaks of."""
    async with Stack(STORYTELLER / "model", tmp_path_factory.mktemp("guide")) as running:
        await running.upload(STORYTELLER / "adapters" / "pirate", "demo/pirate", aliases=["prod"])
        await running.wait_known("demo/pirate@prod")
        yield running


def environment(stack: Stack) -> dict[str, str]:
    """What the guide says to export."""
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "LORIKEET_INFERENCE": stack.node_address,
        "LORIKEET_MANAGER": stack.manager_address,
        "LORIKEET_TOKEN": stack.token,
    }


async def run(stack: Stack, *command: str) -> str:
    """Run it in the repository's root; its output, if it succeeded."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env=environment(stack),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, f"{command}: {out.decode()}{err.decode()}"
    return out.decode()


async def test_the_command(stack: Stack) -> None:
    """Push, generate and residency as shown; `up` and what it prints are tests of their own."""
    (block, *_) = blocks("The `lorikeet` command", "sh")
    shown = [line for line in commands(block) if not line.startswith(("export ", "lorikeet up "))]
    assert [line.split()[1] for line in shown] == ["adapters", "generate", "residency"]
    outputs = [await run(stack, "sh", "-c", line) for line in shown]
    assert "pirate" in outputs[0]
    assert "rr" in outputs[1]
    assert "active" in outputs[2]


async def test_python(stack: Stack) -> None:
    """The blocking snippet as it stands; the asyncio one with the addresses of this stack."""
    blocking, asyncio_, *_ = blocks("Python", "python")
    out = await run(stack, sys.executable, "-c", blocking)
    assert "FinishReason" in out or "stop_token" in out
    assert len(out) > 200
    placeholder = 'token="lk_..."'
    assert placeholder in asyncio_
    here = f'"{stack.node_address}", "{stack.manager_address}", "{stack.token}"'
    out = await run(stack, sys.executable, "-c", asyncio_.replace(placeholder, here))
    assert "demo" in out
    assert "pirate" in out.splitlines()[-1]


async def test_structured_output(stack: Stack) -> None:
    """The snippet as it stands."""
    (block,) = blocks("Structured output", "python")
    age, answer = (await run(stack, sys.executable, "-c", block)).splitlines()
    assert 0 <= int(age) <= 20
    assert answer in {"yes", "no"}


@pytest.mark.skipif(
    shutil.which("node") is None or not (ROOT / "clients/node/node_modules/@grpc").exists(),
    reason="node or the packages of clients/node are not installed (make test installs them)",
)
async def test_node(stack: Stack) -> None:
    """The line after `npm ci`."""
    (block,) = blocks("Node", "sh")
    install, line = commands(block)
    assert install.startswith("npm ci --prefix clients/node")
    assert len(await run(stack, "sh", "-c", line)) > 100


async def test_grpcurl(stack: Stack) -> None:
    """The same calls by reflection alone; by grpcurl itself, too, where it is installed."""
    (block,) = blocks("Any language", "sh")
    shown = commands(block)
    replies = [await asyncio.to_thread(reflected, line, environment(stack)) for line in shown]
    assert "lorikeet.inference.v1.InferenceService" in replies[0]
    assert json.loads(replies[1][-1])["finish"]["adapter"]["revision"].startswith(
        "tenants/demo/adapters/pirate/"
    )
    assert json.loads(replies[2][0])["adapters"][0]["name"] == "tenants/demo/adapters/pirate"
    if shutil.which("grpcurl"):
        for line in shown:
            assert await run(stack, "sh", "-c", line)


def reflected(line: str, variables: dict[str, str]) -> list[str]:
    """What grpcurl does with such a line: everything it knows of the messages comes from the server."""
    words = [re.sub(r"\$(\w+)", lambda m: variables[m[1]], word) for word in shlex.split(line)]
    program, plaintext, *rest = words
    assert (program, plaintext) == ("grpcurl", "-plaintext")
    options: dict[str, str] = {}
    while rest[0].startswith("-"):
        options[rest[0]] = rest[1]
        rest = rest[2:]
    assert options.keys() <= {"-H", "-d"}
    target, what = rest
    with grpc.insecure_channel(target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        if what == "list":
            return list(database.get_services())
        service, _, name = what.partition("/")
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName(service).FindMethodByName(name)
        request = json_format.Parse(
            options.get("-d", "{}"),
            message_factory.GetMessageClass(method.input_type)(),
            descriptor_pool=pool,
        )
        header, _, value = options["-H"].partition(": ")
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
        call = make(
            f"/{what}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        answer = call(request, metadata=((header, value),), timeout=120)
        return [json_format.MessageToJson(m) for m in (answer if method.server_streaming else [answer])]
