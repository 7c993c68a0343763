"""Generated adapters on a node: named by the bench itself, or uploaded through a manager."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from lorikeet_bench.load.generated_adapters import (
    AdapterShape,
    AdapterStore,
    write_random_adapters,
    write_watermark_adapters,
)
from lorikeet_bench.load.peft_directories import write_peft_adapter
from lorikeet_bench.load.rig_tokens import RigTokens
from lorikeet_bench.serve.run import ServedAdapters
from lorikeet_bench.serve.target import NodeAddress
from lorikeet_client import AsyncLorikeet, LorikeetError, SamplingParams

_LOAD_S = 600.0


async def write_store(
    node: NodeAddress, directory: Path, shape: AdapterShape, count: int, rig: RigTokens | None
) -> AdapterStore:
    """Make `count` adapters for what the node serves; nothing is told to it."""
    async with AsyncLorikeet(node.inference, token=node.token, tls=node.tls) as client:
        model = await client.get_model()
    schema, base_digest = model.lora_schema, model.base_digest
    if rig is not None:
        return await asyncio.to_thread(
            write_watermark_adapters, directory, schema, base_digest, rig.shape, rig.forced
        )
    return await asyncio.to_thread(write_random_adapters, directory, schema, base_digest, shape, count)


@asynccontextmanager
async def uploaded_adapters(
    node: NodeAddress, manager: str, tenant: str, directory: Path, shape: AdapterShape, count: int
) -> AsyncGenerator[ServedAdapters]:
    """Push `count` adapters to the manager and load them on the device; deletes them at the end.

    Raises:
        CallError: a service refused, or did not answer.
    """
    async with AsyncLorikeet(node.inference, manager, node.token, node.tls) as client:
        schema = (await client.get_model()).lora_schema
        names = [f"{tenant}/bench-{index:03}" for index in range(count)]
        pushed: list[str] = []
        digests: list[str] = []
        try:
            for index, name in enumerate(names):
                path = await asyncio.to_thread(
                    write_peft_adapter, directory / "upload", schema, shape, seed=index
                )
                pushed.append(name)
                result = await client.upload_adapter(path, name)
                digests.append(result.revision.digest)
                await client.load_adapter(name, timeout_s=_LOAD_S)
            yield ServedAdapters(names, digests)
        except BaseException:
            for name in pushed:
                # What broke off is told, not what is met in cleaning up after it: the last may not be there.
                with suppress(LorikeetError):
                    await client.delete_adapter(name)
            raise
        for name in pushed:
            await client.delete_adapter(name)


async def check_named(node: NodeAddress, names: Sequence[str]) -> None:
    """Ask every adapter for one token: what is not there is told before anything is measured.

    Raises:
        CallError: the node does not take one of them.
    """
    one_token = SamplingParams(max_tokens=1)
    async with AsyncLorikeet(node.inference, token=node.token, tls=node.tls) as client:
        for name in names:
            await client.complete(token_ids=[1], adapter=name, sampling=one_token, timeout_s=_LOAD_S)
