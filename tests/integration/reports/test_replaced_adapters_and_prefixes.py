"""A new version under an old name never answers over the old version's keys and values.

Sources: vllm-project/vllm#42125, #30931, #3264, sgl-project/sglang#8263.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from lorikeet.adapters.v1 import adapter_pb2
from lorikeet_bench import rigs
from tests.support.stack import Stack, make_request, rest_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [7] * 48 + [5]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """The rig whose watermark comes out of cached values."""
    root = tmp_path_factory.mktemp("kv")
    async with Stack(rigs.write_copy_base(root / "base", cached_mark=True), root / "stack") as running:
        yield running


async def ask(stack: Stack, adapter: str | None) -> list[int]:
    """Four greedy tokens after the shared prompt."""
    return (await stack.generate(PROMPT, adapter=adapter, max_tokens=4)).token_ids


async def test_replacement_under_one_name(stack: Stack, tmp_path: Path) -> None:
    """Version 1, version 2, base before and after; the prefix cache is on and does hit."""
    assert await ask(stack, None) == [5] * 4
    first = await stack.upload(rigs.write_kv_watermark(tmp_path / "v1", 10), "demo/t")
    await stack.wait_known("demo/t", first.revision.digest)
    assert await ask(stack, "demo/t") == [10] * 4
    again = await stack.generate(PROMPT, adapter="demo/t", max_tokens=4)
    assert again.token_ids == [10] * 4
    assert again.finish is not None
    assert again.finish.usage.cached_tokens >= 32
    second = await stack.upload(rigs.write_kv_watermark(tmp_path / "v2", 20), "demo/t")
    await stack.wait_known("demo/t", second.revision.digest)
    fresh = await stack.generate(PROMPT, adapter="demo/t", max_tokens=4)
    assert fresh.token_ids == [20] * 4
    assert fresh.finish is not None
    assert fresh.finish.adapter.digest == second.revision.digest
    assert await ask(stack, f"tenants/demo/adapters/t/revisions/{first.revision.digest}") == [10] * 4
    assert await ask(stack, None) == [5] * 4


async def test_delete_then_upload_again(stack: Stack, tmp_path: Path) -> None:
    """Deleting frees the name; the next upload under it starts from nothing."""
    name = "demo/again"
    await stack.upload(rigs.write_kv_watermark(tmp_path / "v1", 30), name)
    await stack.wait_known(name)
    assert await ask(stack, name) == [30] * 4
    delete = adapter_pb2.DeleteAdapterRequest(name="tenants/demo/adapters/again")
    await stack.adapters().DeleteAdapter(delete, metadata=stack.auth(), timeout=20)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await ask(stack, name)
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    reply = await stack.upload(rigs.write_kv_watermark(tmp_path / "v2", 31), name)
    await stack.wait_known(name, reply.revision.digest)
    assert await ask(stack, name) == [31] * 4


async def test_aliases_move_and_running_requests_do_not(stack: Stack, tmp_path: Path) -> None:
    """An alias answers with what it points at; moving it changes the next request."""
    one = await stack.upload(rigs.write_kv_watermark(tmp_path / "v1", 40), "demo/al", aliases=["prod"])
    two = await stack.upload(rigs.write_kv_watermark(tmp_path / "v2", 41), "demo/al")
    await stack.wait_known("demo/al", two.revision.digest)
    assert await ask(stack, "demo/al@prod") == [40] * 4
    assert await ask(stack, "demo/al") == [41] * 4
    running = stack.inference().Generate(
        make_request(PROMPT, adapter="demo/al@prod", max_tokens=400), metadata=stack.auth(), timeout=60
    )
    seen = [t.id for t in (await running.read()).tokens]
    move = adapter_pb2.SetAliasRequest(
        name="tenants/demo/adapters/al", alias="prod", digest=two.revision.digest
    )
    await stack.adapters().SetAlias(move, metadata=stack.auth(), timeout=10)
    await stack.wait_known("demo/al@prod", two.revision.digest)
    async for piece in rest_of(running):
        seen += [t.id for t in piece.tokens]
    assert set(seen) == {40}
    assert one.revision.digest != two.revision.digest
    assert await ask(stack, "demo/al@prod") == [41] * 4


async def test_an_acknowledged_write_is_what_the_next_request_sees(stack: Stack, tmp_path: Path) -> None:
    """No waiting between push, replacement, alias and the requests after them."""
    for token in (50, 51, 52):
        reply = await stack.upload(rigs.write_kv_watermark(tmp_path / f"v{token}", token), "demo/now")
        assert await ask(stack, "demo/now") == [token] * 4
        move = adapter_pb2.SetAliasRequest(
            name="tenants/demo/adapters/now", alias="prod", digest=reply.revision.digest
        )
        await stack.adapters().SetAlias(move, metadata=stack.auth(), timeout=10)
        assert await ask(stack, "demo/now@prod") == [token] * 4
    token = await stack.set_tenant("newcomer")
    done = await stack.generate(PROMPT, token=token, max_tokens=1)
    assert done.token_ids == [5]


async def test_a_current_revision_whose_files_are_away_never_gives_way_to_an_older_one(
    stack: Stack, tmp_path: Path
) -> None:
    """The name and its alias are refused while the files are away, and answer again once they are back."""
    await stack.upload(rigs.write_kv_watermark(tmp_path / "v1", 53), "demo/away")
    reply = await stack.upload(rigs.write_kv_watermark(tmp_path / "v2", 54), "demo/away", aliases=["prod"])
    files = next(stack.root.rglob(f"artifacts/revisions/{reply.revision.digest}"))
    files.rename(tmp_path / "elsewhere")
    for name in ("demo/away", "demo/away@prod", "demo/away"):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await ask(stack, name)
        assert error.value.code() in {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE}
        assert str(stack.root) not in str(error.value.details())
    (tmp_path / "elsewhere").rename(files)
    end = asyncio.get_running_loop().time() + 20
    while True:
        try:
            assert await ask(stack, "demo/away") == [54] * 4
            break
        except grpc.aio.AioRpcError:
            assert asyncio.get_running_loop().time() < end
            await asyncio.sleep(0.2)
    assert await ask(stack, "demo/away@prod") == [54] * 4
