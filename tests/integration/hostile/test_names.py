"""Names made to reach files that are not the uploader's: of adapters, tenants, aliases, files and tensors.

Over raw gRPC, the Python client and the command: each is refused, nothing outside the store is written,
removed or changed. Sources: NVIDIA/TensorRT-LLM#13391, leejet/stable-diffusion.cpp#1156.
"""

import hashlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from safetensors.numpy import load_file, save_file

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet.adapters.v1 import tenant_pb2
from lorikeet_client import InvalidRequestError
from tests.support.enclosed_stack import SERVED, EnclosedStack, refusal
from tests.support.uploads import upload_parts

pytestmark = pytest.mark.asyncio(loop_scope="session")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INVALID = grpc.StatusCode.INVALID_ARGUMENT

NAMES = [
    "", " ", ".", "..", "../x", "../../x", "demo/../x", "demo/..", "demo/../../x", "demo/.", "demo/", "/x",
    "/abs/path", "a/b/c", "demo//x", "demo/.hidden", "~root", "demo/~", "x" * 300, "demo/" + "x" * 300,
    "demo/a\0b", "demo/a\r\nauthorization: x", "demo/a\nb", "demo/a\tb", "demo/a b", "demo/a ", " demo/a",
    "demo/\u0430", "demo/\uff41", "demo/a\u200b", "demo/\u202ea", "demo/e\u0301", "demo/A", "base",
    "demo/base",
    "tenants/demo/adapters/../../x", "tenants/demo/adapters/", "tenants/../adapters/x", "..%2f..%2fx",
    "%2e%2e/x", "..\\..\\x", "C:\\x", "file:///x", "hf://user/repo", "$(touch x)", "`id`", "a;rm -rf x",
]  # fmt: skip
FILES = [
    "", ".", "..", "../adapter_model.safetensors", "/tmp/adapter_model.safetensors",
    "x/adapter_model.safetensors",
    "adapter_model.safetensors/", "./adapter_model.safetensors", "adapter_model.safetensors\0", "..\\x",
    "adapter_model.safetensors\n", "\uff41dapter_model.safetensors", "adapter_model.bin", "adapter_model.pt",
    "training_args.bin", "adapter.zip", "adapter.tar", "adapter.tar.gz", "modeling_x.py",
    "adapter_model-1-of-2.safetensors", ".bashrc", "x" * 300,
]  # fmt: skip
TENSORS = [
    "../../x",
    "/etc/passwd",
    "a\0b",
    "a\r\nb",
    "..",
    "",
    "a/../b",
    "C:\\x",
    "m\u043edel.x",
    "x" * 5000,
]


@pytest.mark.parametrize("name", NAMES)
async def test_names_of_adapters(enclosed: EnclosedStack, directory: Path, name: str) -> None:
    """INVALID_ARGUMENT from all three ways to upload, and to every other call that takes a name."""
    assert (await refusal(enclosed.upload(directory, name)))[0] is INVALID
    assert isinstance(await enclosed.refused_by_client(directory, name), InvalidRequestError)
    if "\0" not in name:  # no command line can hold it
        assert await enclosed.pushed(directory, name) == 1
    calls: dict[str, Any] = {
        "GetAdapter": pb.GetAdapterRequest(name=name),
        "DeleteAdapter": pb.DeleteAdapterRequest(name=name),
        "LoadAdapter": pb.LoadAdapterRequest(name=name),
        "UnloadAdapter": pb.UnloadAdapterRequest(name=name),
    }
    for method, request in calls.items():
        call = getattr(enclosed.stack.adapters(), method)(request, metadata=enclosed.stack.auth(), timeout=20)
        assert (await refusal(call))[0] is INVALID, method
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await enclosed.stack.generate([1], adapter=name, max_tokens=1)
    assert error.value.code() in {INVALID, grpc.StatusCode.NOT_FOUND}


async def test_a_name_of_another_tenant_is_no_path(enclosed: EnclosedStack, directory: Path) -> None:
    """`a/b` is adapter b of tenant a: there is no such tenant, and none is made."""
    assert (await refusal(enclosed.upload(directory, "a/b")))[0] is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("name", [n for n in NAMES if "/" not in n or n.startswith((".", "/"))])
async def test_names_of_tenants_and_aliases(enclosed: EnclosedStack, directory: Path, name: str) -> None:
    """The same for whatever else becomes a part of a key or of a path."""
    create = tenant_pb2.CreateTenantRequest(tenant_id=name)
    call = enclosed.stack.tenants().CreateTenant(create, metadata=enclosed.stack.auth(), timeout=20)
    assert (await refusal(call))[0] is INVALID
    assert (await refusal(enclosed.upload(directory, "demo/x", aliases=[name])))[0] is INVALID


@pytest.mark.parametrize("name", FILES)
async def test_names_of_files(enclosed: EnclosedStack, directory: Path, name: str) -> None:
    """Announced in the header, or in a chunk only; beside sound files or in their place."""
    sound = list(upload_parts(directory, "demo/x"))
    data = b"content"
    head = pb.FileHeader(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    chunk = pb.UploadRequest(chunk=pb.FileChunk(file_name=name, data=data))
    beside = pb.UploadHeader(adapter="demo/x", files=[*sound[0].header.files, head])
    instead = pb.UploadHeader(
        adapter="demo/x", files=[f for f in sound[0].header.files if f.name == CONFIG] + [head]
    )
    streams = [
        [pb.UploadRequest(header=beside), *sound[1:], chunk],
        [pb.UploadRequest(header=instead), sound[1], chunk],
        [sound[0], chunk],
    ]
    for parts in streams:
        assert (await refusal(enclosed.send(parts)))[0] is INVALID


@pytest.mark.parametrize("name", TENSORS)
async def test_names_of_tensors(enclosed: EnclosedStack, directory: Path, name: str) -> None:
    """A sound file but for one tensor's name."""
    tensors = load_file(directory / WEIGHTS)
    first = next(iter(tensors))
    save_file({name if key == first else key: value for key, value in tensors.items()}, directory / WEIGHTS)
    code, message = await refusal(enclosed.upload(directory, "demo/x"))
    assert code is INVALID
    assert "named" in message or f"1 tensor matches nothing in the base model: {name!r}" in message
    assert isinstance(await enclosed.refused_by_client(directory, "demo/x"), InvalidRequestError)
    assert await enclosed.pushed(directory, "demo/x") == 1


async def test_request_ids_are_no_paths(enclosed: EnclosedStack, directory: Path) -> None:
    """They may be any printable text; what is staged for them lies where all else does."""
    for request_id in ("a\0b", "a\r\nb", "\u0430"):
        assert (await refusal(enclosed.upload(directory, "demo/x", request_id=request_id)))[0] is INVALID
    for request_id in ("../../x", "/abs", ".."):
        reply = await enclosed.upload(directory, "demo/x", validate_only=True, request_id=request_id)
        assert reply.revision.report.tensors_used


async def test_the_others_are_served_as_before(enclosed: EnclosedStack) -> None:
    """After all that."""
    name, mark = SERVED
    assert (await enclosed.stack.generate([5], adapter=name, max_tokens=3)).token_ids == [mark] * 3
