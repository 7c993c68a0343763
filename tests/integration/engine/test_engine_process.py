"""The real engine process with a fake device behind it, through EngineClient."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from inference_service.domain.adapter import AdapterDemand, AdapterSource, DesiredAdapter, ResidencyTier
from inference_service.domain.engine import EngineStatus
from inference_service.domain.errors import (
    AdapterNotFoundError,
    AdapterUnavailableError,
    DrainingError,
    DuplicateRequestError,
    EngineDeadError,
    LimitExceededError,
    PayloadMissingError,
)
from inference_service.domain.request import EngineRequest, FinishReason, RequestFinish
from inference_service.domain.tenant import TenantShare
from inference_service.engine.config import EngineConfig
from inference_service.engine.engine_client import EngineClient
from inference_service.engine.payload_cache import PayloadReceiver
from tests.support.engine_builders import make_request
from tests.support.fake_backend import DEADLY_TOKEN, FACTORY, FAULTY_TOKEN
from tests.support.fake_device import expected_tokens, make_manifest

# One event loop for the module, since the shared engine lives in it.
pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_BYTES = 100


def make_config(tmp_path: Path, model: str = "", **changes: Any) -> EngineConfig:
    """A small engine on the fake device."""
    values: dict[str, Any] = {
        "block_tokens": 4,
        "num_blocks": 256,
        "max_step_tokens": 64,
        "max_running_requests": 16,
        "max_waiting_requests": 200,
        "max_context_tokens": 400,
        "max_active_adapters": 4,
        "arena_bytes": 10_000,
        "host_pool_bytes": 10_000,
        "backend_factory": FACTORY,
        "log_level": "warning",
    }
    return EngineConfig(model_dir=model, disk_cache_dir=str(tmp_path / "cache"), **(values | changes))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineClient]:
    """One engine for all tests that leave it as they found it; starting one takes a second or more."""
    config = make_config(tmp_path_factory.mktemp("engine"), "step_s=0.002&read_s=0.02")
    async with running(config) as shared:
        yield shared


@asynccontextmanager
async def running(config: EngineConfig) -> AsyncIterator[EngineClient]:
    """An engine for one test."""
    engine = await EngineClient.start(config)
    try:
        yield engine
    finally:
        await engine.close()


def store_adapters(tmp_path: Path, count: int) -> tuple[list[str], str]:
    """Write revisions into a local store; their digests and the store's URL."""
    store = tmp_path / "store"
    digests: list[str] = []
    for index in range(count):
        manifest = make_manifest(f"{tmp_path.name}-{index}", NUM_BYTES)
        directory = store / "revisions" / manifest.digest
        directory.mkdir(parents=True)
        (directory / "manifest.json").write_bytes(manifest.to_json())
        (directory / "payload").write_bytes(bytes(NUM_BYTES))
        digests.append(manifest.digest)
    return digests, store.as_uri()


def wanted(
    digest: str, tier: ResidencyTier = ResidencyTier.ABSENT, *, streamed: bool = False
) -> DesiredAdapter:
    """A catalog entry."""
    return DesiredAdapter(AdapterSource(digest, "" if streamed else f"revisions/{digest}", NUM_BYTES), tier)


async def collect(engine: EngineClient, request: EngineRequest) -> tuple[list[int], RequestFinish]:
    """Run a request to its end."""
    tokens: list[int] = []
    async for output in engine.generate(request):
        assert output.request_id == request.request_id
        tokens += output.token_ids
        if output.finish is not None:
            return tokens, output.finish
    raise AssertionError("the stream ended without a finish")


async def eventually(check: Callable[[], Awaitable[bool]], within_s: float = 10) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(within_s):
        while not await check():  # noqa: ASYNC110 (the engine has no event for it)
            await asyncio.sleep(0.02)


async def settled(engine: EngineClient) -> EngineStatus:
    """The status once nothing runs."""

    async def is_idle() -> bool:
        status = await engine.status()
        return status.running_requests == status.waiting_requests == status.adapter_leases == 0

    await eventually(is_idle)
    return await engine.status()


async def test_64_streams_with_random_cancels(engine: EngineClient, tmp_path: Path) -> None:
    """Base and six adapters over four slots: every token right, every counter back at its start."""
    digests, store_url = store_adapters(tmp_path, 6)
    await engine.set_tenants([TenantShare("t0", 2.0)])
    await engine.set_desired([wanted(digest) for digest in digests], store_url)
    before = await engine.status()
    rng = random.Random(7)

    async def stream(index: int) -> None:
        for turn in range(4):
            digest = rng.choice([None, *digests])
            prompt = tuple(rng.randrange(50) for _ in range(rng.randrange(1, 60)))
            count = rng.randrange(1, 30)
            cancel_after = rng.choice([None, None, 0, 1, 5])
            request = make_request(
                f"{index}.{turn}", prompt, tenant=f"t{index % 3}", digest=digest, max_tokens=count
            )
            tokens: list[int] = []
            async with aclosing(engine.generate(request)) as outputs:
                if cancel_after == 0 and turn % 2:
                    continue  # closed before it began
                async for output in outputs:
                    tokens += output.token_ids
                    if cancel_after is not None and len(tokens) >= cancel_after:
                        break
            assert tokens == expected_tokens(digest, prompt, len(tokens))
            if cancel_after is None:
                assert len(tokens) == count

    async def cancelled(index: int) -> None:
        task = asyncio.create_task(stream(index))
        await asyncio.sleep(rng.random() * 0.3)
        task.cancel()
        await asyncio.wait({task})

    await asyncio.gather(*(stream(i) for i in range(48)), *(cancelled(i) for i in range(48, 64)))
    after = await settled(engine)
    assert after.kv_blocks_available == before.kv_blocks_available == 256
    assert after.adapter_loads >= 6


async def test_abort_ends_a_stream_and_twice_is_fine(engine: EngineClient, tmp_path: Path) -> None:
    """The consumer gets ABORTED; the same id may be used at once."""
    for _ in range(2):
        ends = []
        async for output in engine.generate(make_request("a", max_tokens=300)):
            engine.abort("a")
            engine.abort("a")
            ends.append(output.finish)
        assert ends[-1] is not None
        assert ends[-1].reason is FinishReason.ABORTED
    engine.abort("never")
    assert (await settled(engine)).kv_blocks_available == 256


async def test_reused_id_gets_its_own_tokens(engine: EngineClient, tmp_path: Path) -> None:
    """A stream is closed and its id used again before the engine knows: nothing crosses over."""
    for turn in range(20):
        async with aclosing(engine.generate(make_request("same", (turn,), max_tokens=50))) as outputs:
            async for output in outputs:
                assert list(output.token_ids) == expected_tokens(None, (turn,), len(output.token_ids))
                break


async def test_deadline_ends_running_and_waiting_requests(tmp_path: Path) -> None:
    """Both end with DEADLINE; the waiting one without a token."""
    async with running(make_config(tmp_path, "step_s=0.005", max_running_requests=1)) as engine:
        now_s = asyncio.get_running_loop().time()
        first = make_request("a", max_tokens=390, deadline_s=now_s + 1.5)
        second = make_request("b", max_tokens=300, deadline_s=now_s + 0.3)
        (tokens, end), (none, late) = await asyncio.gather(collect(engine, first), collect(engine, second))
        assert (end.reason, late.reason) == (FinishReason.DEADLINE, FinishReason.DEADLINE)
        assert len(tokens) == end.output_tokens < 390
        assert none == []


async def test_refusals_are_typed(engine: EngineClient, tmp_path: Path) -> None:
    """Limits, duplicates and unknown adapters raise their own class."""
    with pytest.raises(LimitExceededError, match="max_context_tokens"):
        await collect(engine, make_request("a", range(500)))
    with pytest.raises(AdapterNotFoundError):
        await collect(engine, make_request("a", digest="f" * 64))
    async with aclosing(engine.generate(make_request("a", max_tokens=300))) as outputs:
        await anext(outputs)
        with pytest.raises(DuplicateRequestError):
            await collect(engine, make_request("a"))


@pytest.mark.parametrize("token", [DEADLY_TOKEN, FAULTY_TOKEN])
async def test_engine_death_fails_streams_and_is_healed(tmp_path: Path, token: int) -> None:
    """Running streams and calls get EngineDeadError; the next engine knows the catalog and another id."""
    digests, store_url = store_adapters(tmp_path, 1)
    async with running(make_config(tmp_path, "step_s=0.005", log_level="critical")) as engine:
        await engine.set_desired([wanted(digests[0])], store_url)
        first_life = engine.instance_id
        watch = engine.watch_residency()
        victim = asyncio.create_task(collect(engine, make_request("victim", max_tokens=300)))
        await asyncio.sleep(0.1)
        with pytest.raises(EngineDeadError):
            await collect(engine, make_request("killer", (token,)))
        with pytest.raises(EngineDeadError):
            await victim
        with pytest.raises(EngineDeadError):
            async for _ in watch:
                pass
        with pytest.raises(EngineDeadError):
            await collect(engine, make_request("too soon"))
        assert await engine.status() == EngineStatus()

        async def is_back() -> bool:
            return engine.is_alive

        await eventually(is_back, 30)
        assert engine.instance_id != first_life
        tokens, end = await collect(engine, make_request("after", digest=digests[0]))
        assert tokens == expected_tokens(digests[0], (1, 2, 3), 4)
        assert end.tier_hit is ResidencyTier.ABSENT


async def test_engine_that_cannot_start_says_why() -> None:
    """The factory's error is in the message."""
    with pytest.raises(EngineDeadError, match="the model directory is empty"):
        await EngineClient.start(make_config(Path("/nonexistent"), "fail=1", log_level="critical"))


async def test_an_engine_tells_how_long_its_start_took(tmp_path: Path) -> None:
    """Its process, its backend's module, what the backend itself timed, and the loop, in this order."""
    begun_s = time.monotonic()
    engine = await EngineClient.start(make_config(tmp_path))
    try:
        elapsed_s = time.monotonic() - begun_s
        phases = engine.info.start_phases
        assert [name for name, _ in phases] == ["process", "import", "weights", "loop"]
        assert dict(phases)["weights"] == 1.5
        assert all(seconds >= 0 for _, seconds in phases)
        assert 0 < sum(seconds for name, seconds in phases if name != "weights") < elapsed_s
    finally:
        await engine.close()


async def test_load_unload_and_news(engine: EngineClient, tmp_path: Path) -> None:
    """Load to ACTIVE, list, unload; the watcher hears of it in order."""
    digests, store_url = store_adapters(tmp_path, 2)
    watch = engine.watch_residency()
    await engine.set_desired([wanted(digest) for digest in digests], store_url)
    loaded = await engine.load_adapter(wanted(digests[0], ResidencyTier.ACTIVE))
    assert (loaded.tier, loaded.arena_bytes) == (ResidencyTier.ACTIVE, NUM_BYTES)
    assert loaded in await engine.resident()
    before = await engine.status()
    assert await engine.unload_adapter(digests[0], keep_on_disk=True)
    assert not await engine.unload_adapter(digests[0], keep_on_disk=True)
    after = await engine.status()
    assert after.active_adapters == before.active_adapters - 1
    assert after.host_used_bytes == before.host_used_bytes - NUM_BYTES
    told: list[ResidencyTier] = []
    async with asyncio.timeout(5):
        async for news in watch:
            assert not isinstance(news, AdapterDemand)
            if news.digest == digests[0]:
                told.append(news.tier)
            if ResidencyTier.ACTIVE in told[:-1] and told[-1] is not ResidencyTier.ACTIVE:
                break


async def test_payload_is_streamed_where_no_store_is_shared(tmp_path: Path) -> None:
    """A request waits, demand is told, the payload is received into the cache, the request runs."""
    manifest = make_manifest("streamed", NUM_BYTES)
    config = make_config(tmp_path)
    async with running(config) as engine:
        watch = engine.watch_residency()
        await engine.set_desired([wanted(manifest.digest, streamed=True)], "")
        waiting = asyncio.create_task(collect(engine, make_request("a", digest=manifest.digest)))
        async with asyncio.timeout(5):
            async for news in watch:
                if isinstance(news, AdapterDemand):
                    assert (news.digest, news.waiting_requests) == (manifest.digest, 1)
                    break
        with pytest.raises(PayloadMissingError):
            await engine.load_adapter(wanted(manifest.digest, ResidencyTier.HOST, streamed=True))
        receiver = PayloadReceiver(config.disk_cache_dir, manifest.digest, manifest.to_json())
        receiver.write(0, bytes(NUM_BYTES))
        receiver.commit()
        await engine.load_adapter(wanted(manifest.digest, ResidencyTier.HOST, streamed=True))
        tokens, _ = await waiting
        assert tokens == expected_tokens(manifest.digest, (1, 2, 3), 4)


async def test_damaged_payload_fails_only_its_requests(engine: EngineClient, tmp_path: Path) -> None:
    """A payload cut short: its request fails and says so, base goes on."""
    digests, store_url = store_adapters(tmp_path, 1)
    (tmp_path / "store" / "revisions" / digests[0] / "payload").write_bytes(b"short")
    await engine.set_desired([wanted(digests[0])], store_url)
    with pytest.raises(AdapterUnavailableError, match="has 5 bytes"):
        await collect(engine, make_request("a", digest=digests[0]))
    assert (await collect(engine, make_request("b")))[0] == expected_tokens(None, (1, 2, 3), 4)


async def test_drain_waits_then_aborts(tmp_path: Path) -> None:
    """A short request ends by itself, a long one is aborted after the grace, new ones are refused."""
    async with running(make_config(tmp_path, "step_s=0.005")) as engine:
        short = asyncio.create_task(collect(engine, make_request("short", max_tokens=20)))
        long = asyncio.create_task(collect(engine, make_request("long", max_tokens=390)))
        await asyncio.sleep(0.05)
        assert await engine.drain(0.6) == 1
        assert (await short)[1].reason is FinishReason.LENGTH
        assert (await long)[1].reason is FinishReason.ABORTED
        with pytest.raises(DrainingError):
            await collect(engine, make_request("late"))


async def test_idle_engine_does_not_spin(engine: EngineClient, tmp_path: Path) -> None:
    """An engine with nothing to do, and one that waits for a payload, use next to no processor time."""
    await engine.set_desired([wanted("f" * 64, streamed=True)], "")
    waiting = asyncio.create_task(collect(engine, make_request("a", digest="f" * 64)))
    assert engine._process is not None
    child = psutil.Process(engine._process._process.pid)
    await asyncio.sleep(0.3)
    start = child.cpu_times()
    await asyncio.sleep(1.0)
    end = child.cpu_times()
    assert end.user + end.system - start.user - start.system < 0.2
    waiting.cancel()
    await asyncio.wait({waiting})
    await settled(engine)


async def test_engine_dies_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed outright: the engine process is gone within a second or two."""
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from tests.integration.engine.test_engine_process import EngineClient, make_config\n"
        "async def main():\n"
        "    engine = await EngineClient.start(make_config(Path(sys.argv[1])))\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    root = Path(__file__).resolve().parents[3]
    parent = subprocess.Popen(  # noqa: ASYNC220 (nothing else runs in this test)
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == "ready\n"
        (child,) = psutil.Process(parent.pid).children()
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        child.wait(timeout=5)
