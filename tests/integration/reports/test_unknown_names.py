"""Only an unset adapter means the base model; any other name that is not an adapter is an error.

Sources: vllm-project/vllm-metal#464, ai-dynamo/dynamo#11551, vllm-project/production-stack#331.
"""

import asyncio
from pathlib import Path

import grpc
import pytest

from lorikeet.adapters.v1 import adapter_pb2
from lorikeet.inference.v1 import generation_pb2
from lorikeet_bench import rigs
from tests.support.stack import Stack, make_request

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def codes(stack: Stack, name: str, token: str | None = None) -> set[grpc.StatusCode]:
    """The status of a streaming and of a unary request for a name."""
    found: set[grpc.StatusCode] = set()
    request = make_request([1], adapter=name, max_tokens=1)
    stub = stack.inference()
    with pytest.raises(grpc.aio.AioRpcError) as streaming:
        async for _ in stub.Generate(request, metadata=stack.auth(token), timeout=20):
            pass
    found.add(streaming.value.code())
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await stub.Complete(
            generation_pb2.CompleteRequest(request=request), metadata=stack.auth(token), timeout=20
        )
    found.add(unary.value.code())
    return found


@pytest.mark.parametrize(
    "name", ["demo/never", "never", "demo/w10@nosuchalias", "tenants/demo/adapters/never"]
)
async def test_never_registered(copy_stack: Stack, name: str) -> None:
    """NOT_FOUND."""
    assert await codes(copy_stack, name) == {grpc.StatusCode.NOT_FOUND}


async def test_an_unknown_revision(copy_stack: Stack) -> None:
    """A digest that is nobody's is NOT_FOUND."""
    assert await codes(copy_stack, f"tenants/demo/adapters/w10/revisions/{'0' * 64}") == {
        grpc.StatusCode.NOT_FOUND
    }


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "demo/W10",
        "DEMO/w10",
        "demo/w10 ",
        " demo/w10",
        "demo/w10\n",
        "base",
        "demo/base",
        "model",
        "qwen3_moe",
        "demo/w\u04cf0",
    ],
)
async def test_never_silently_the_base(copy_stack: Stack, name: str) -> None:
    """Wrong case, spaces, look-alikes, the base's own name: an error."""
    found = await codes(copy_stack, name)
    assert found <= {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT}


async def test_unset_is_the_base_and_says_so(copy_stack: Stack) -> None:
    """No adapter in the reply."""
    done = await copy_stack.generate([6], max_tokens=2)
    assert done.token_ids == [6, 6]
    assert done.finish is not None
    assert not done.finish.HasField("adapter")


async def test_the_reply_names_adapter_and_revision(copy_stack: Stack) -> None:
    """Every documented spelling answers with the same revision."""
    known = await copy_stack.adapters().GetAdapter(
        adapter_pb2.GetAdapterRequest(name="tenants/demo/adapters/w10"),
        metadata=copy_stack.auth(),
        timeout=10,
    )
    digest = known.adapter.current_digest
    revision = f"tenants/demo/adapters/w10/revisions/{digest}"
    for name in ("w10", "demo/w10", "tenants/demo/adapters/w10", revision):
        done = await copy_stack.generate([6], adapter=name, max_tokens=2)
        assert done.token_ids == [10, 10]
        assert done.finish is not None
        assert (done.finish.adapter.revision, done.finish.adapter.digest) == (revision, digest)


async def test_deleted(copy_stack: Stack, tmp_path: Path) -> None:
    """NOT_FOUND from the moment the delete is acknowledged."""
    await copy_stack.upload(rigs.write_moe_watermark(tmp_path / "gone", 44), "demo/gone")
    await copy_stack.wait_known("demo/gone")
    await copy_stack.adapters().DeleteAdapter(
        adapter_pb2.DeleteAdapterRequest(name="tenants/demo/adapters/gone"),
        metadata=copy_stack.auth(),
        timeout=20,
    )
    assert await codes(copy_stack, "demo/gone") == {grpc.StatusCode.NOT_FOUND}


async def test_registered_but_its_payload_is_gone(copy_stack: Stack, tmp_path: Path) -> None:
    """An error that says so, streaming and unary; the base and other adapters are not touched."""
    reply = await copy_stack.upload(rigs.write_moe_watermark(tmp_path / "broken", 45), "demo/broken")
    store = next(copy_stack.root.rglob(f"revisions/{reply.revision.digest}"))
    (store / "payload").write_bytes(b"short")
    end = asyncio.get_running_loop().time() + 10
    while True:
        found = await codes(copy_stack, "demo/broken")
        if grpc.StatusCode.NOT_FOUND not in found:
            break
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.05)
    assert found == {grpc.StatusCode.FAILED_PRECONDITION}
    assert (await copy_stack.generate([6], adapter="demo/w20", max_tokens=2)).token_ids == [20, 20]


async def test_another_tenants_adapter_is_not_found(copy_stack: Stack) -> None:
    """A tenant can neither use nor see what is not its own."""
    token = await copy_stack.set_tenant("elsewhere")
    end = asyncio.get_running_loop().time() + 10
    while True:
        found = await codes(copy_stack, "demo/w10", token)
        if grpc.StatusCode.UNAUTHENTICATED not in found:
            break
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.05)
    assert found == {grpc.StatusCode.NOT_FOUND}
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await copy_stack.adapters().GetAdapter(
            adapter_pb2.GetAdapterRequest(name="tenants/demo/adapters/w10"),
            metadata=copy_stack.auth(token),
            timeout=10,
        )
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
