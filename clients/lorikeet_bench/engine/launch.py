"""An engine for a bench, with adapters of its own in their slots."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from inference_service.domain.adapter import AdapterSource, DesiredAdapter, ResidencyTier
from inference_service.engine.config import DEFAULT_BACKEND_FACTORY
from inference_service.engine.engine_client import EngineClient
from lorikeet_bench.engine.plan import EnginePlan
from lorikeet_bench.engine.settings import engine_config
from lorikeet_bench.load.generated_adapters import (
    AdapterStore,
    write_random_adapters,
    write_watermark_adapters,
)
from lorikeet_contract.schema import LoraSchema


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A ready engine whose adapters are all active."""

    client: EngineClient
    store: AdapterStore
    startup_s: float
    adapter_load_s: float | None


@asynccontextmanager
async def loaded_engine(
    plan: EnginePlan, tokens: tuple[int, ...] = (), backend_factory: str = DEFAULT_BACKEND_FACTORY
) -> AsyncGenerator[LoadedEngine]:
    """Start the engine, make `plan.slots` adapters and load them; ends the process at the end.

    Args:
        plan: what to start.
        tokens: on a rig, the token that each adapter forces.
        backend_factory: what builds the device in the engine process.

    Raises:
        LoadError: the engine could not start, or an adapter could not be loaded; the message says why.
    """
    config = engine_config(plan, backend_factory)
    begun_s = time.perf_counter()
    client = await EngineClient.start(config)
    startup_s = time.perf_counter() - begun_s
    try:
        store = AdapterStore("", ())
        load_s = None
        if plan.slots:
            # Writing takes seconds for large adapters, and blocks nothing that is measured.
            store = await asyncio.to_thread(_write, plan, client, tokens)
            load_s = await _load(client, store)
        yield LoadedEngine(client, store, startup_s, load_s)
    finally:
        await client.close()


def _write(plan: EnginePlan, client: EngineClient, tokens: tuple[int, ...]) -> AdapterStore:
    schema = LoraSchema.from_json(client.info.lora_schema)
    directory, base_digest = plan.directory / "store", client.info.base_digest
    if plan.rig is not None:
        return write_watermark_adapters(directory, schema, base_digest, plan.rig, tokens)
    return write_random_adapters(directory, schema, base_digest, plan.adapters, plan.slots)


async def _load(client: EngineClient, store: AdapterStore) -> float:
    """Bring all adapters to the device, and pin them; returns the seconds it took."""
    begun_s = time.perf_counter()
    wanted = [
        DesiredAdapter(
            AdapterSource(adapter.digest, adapter.store_path, adapter.payload_bytes),
            ResidencyTier.ACTIVE,
            pinned=True,
        )
        for adapter in store.adapters
    ]
    await client.set_desired(wanted, store.url)
    for adapter in await asyncio.gather(*(client.load_adapter(one) for one in wanted)):
        assert adapter.tier is ResidencyTier.ACTIVE
    return time.perf_counter() - begun_s
