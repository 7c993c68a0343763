"""What the node counts is what its clients saw: every request, token, refusal, load and eviction."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from lorikeet.adapters.v1 import adapter_pb2
from lorikeet.inference.v1 import generation_pb2, model_pb2
from lorikeet_bench import rigs
from tests.support.metered_stack import MeteredStack
from tests.support.request_journal import Journal
from tests.support.scrapes import Scrape

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Two slots, and host memory for three of the adapters below, each of 90 kB.
FLAGS = (
    "--max-running-requests", "2", "--max-waiting-requests", "1", "--max-active-adapters", "2",
    "--adapter-arena-bytes", "200000", "--host-pool-bytes", "300000", "--block-tokens", "8",
)  # fmt: skip
ADAPTERS = ("a", "b", "c", "d")
LONG = 4000
PARTS = ("queue", "adapter_wait", "prefill", "decode")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeteredStack]:
    """Four adapters registered, none of them on the node."""
    root = tmp_path_factory.mktemp("counts")
    base = rigs.write_copy_base(root / "base")
    async with MeteredStack(base, root / "stack", node_flags=FLAGS) as running:
        for index, name in enumerate(ADAPTERS):
            await running.upload(rigs.write_moe_watermark(root / name, 10 + index), f"demo/{name}")
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def journal(stack: MeteredStack) -> AsyncIterator[Journal]:
    """Empty; afterwards the node's counters must have grown by it, and its gauges be back."""
    before = await stack.node_scrape()
    journal = Journal(stack)
    yield journal
    after = await stack.node_shows(is_at_rest)
    compare(journal, before, after)
    check_status(after, await stack.status())


def is_at_rest(found: Scrape) -> bool:
    """Nothing runs or waits, no lease and no block is held."""
    gauges = ("requests_running", "requests_waiting", "requests_waiting_for_adapter", "adapter_leases",
              "kv_blocks_used", "kv_usage_ratio")  # fmt: skip
    return not any(found.value(f"lorikeet_{name}") for name in gauges) and all(
        found.value(f"{prefix}{name}") == 0
        for prefix in ("vllm:", "vllm_")
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    )


def grown(before: Scrape, after: Scrape, name: str, label: str) -> dict[str, float]:
    """By how much a counter grew, by label, where it did."""
    first, last = before.by(name, label), after.by(name, label)
    return {key: value - first.get(key, 0) for key, value in last.items() if value != first.get(key, 0)}


def compare(journal: Journal, before: Scrape, after: Scrape) -> None:
    """Everything that the journal knows."""

    def plus(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    assert grown(before, after, "lorikeet_requests_finished_total", "reason") == journal.finished
    assert grown(before, after, "lorikeet_requests_rejected_total", "reason") == journal.rejected
    assert plus("lorikeet_prompt_tokens_total") == journal.prompt_tokens
    assert plus("lorikeet_cached_tokens_total") == journal.cached_tokens
    assert plus("lorikeet_output_tokens_total") == journal.output_tokens
    num_finished = journal.finished.total()
    assert plus("lorikeet_request_duration_seconds_count") == num_finished
    assert plus("lorikeet_time_to_first_token_seconds_count") == journal.first_tokens
    assert plus("lorikeet_inter_token_latency_seconds_count") == journal.output_tokens - journal.first_tokens
    for part in PARTS:
        # A deadline may pass at the transport before it does at the engine, which then says nothing.
        late = num_finished - journal.finished["cancelled"] - plus(f"lorikeet_request_{part}_seconds_count")
        assert 0 <= late <= journal.finished["deadline"], part
    calls = [
        (dict(labels)["code"], value - before.samples("lorikeet_rpc_server_calls_total").get(labels, 0))
        for labels, value in after.samples("lorikeet_rpc_server_calls_total").items()
        if dict(labels)["method"].endswith(("/Generate", "/Complete"))
    ]
    by_code = {code: sum(v for c, v in calls if c == code) for code, v in calls if v}
    assert by_code == journal.codes
    stages = grown(before, after, "lorikeet_adapter_load_duration_seconds_count", "stage")
    assert stages.get("read", 0) == journal.reads
    assert stages.get("copy", 0) == journal.copies


def check_status(found: Scrape, status: model_pb2.EngineStatus) -> None:
    """The scrape and GetModel tell the same of the engine."""
    evictions = found.by("lorikeet_adapter_evictions_total", "tier")
    loads = found.by("lorikeet_adapter_load_duration_seconds_count", "stage")
    resident = found.by("lorikeet_adapters_resident", "tier")
    assert {
        "running_requests": found.value("lorikeet_requests_running"),
        "waiting_requests": found.value("lorikeet_requests_waiting"),
        "kv_blocks_total": found.value("lorikeet_kv_blocks_capacity"),
        "kv_blocks_available": found.value("lorikeet_kv_blocks_capacity")
        - found.value("lorikeet_kv_blocks_used"),
        "adapter_leases": found.value("lorikeet_adapter_leases"),
        "active_adapters": resident["active"],
        "arena_used_bytes": found.value("lorikeet_adapter_arena_used_bytes"),
        "host_used_bytes": found.value("lorikeet_host_pool_used_bytes"),
        "steps": found.value("lorikeet_engine_steps_total"),
        "preemptions": found.value("lorikeet_preemptions_total"),
        "adapter_loads": loads["read"],
        "adapter_evictions": sum(evictions.values()),
        "prefix_hit_tokens": found.value("lorikeet_prefix_cache_hit_tokens_total"),
        "compilations": found.value("lorikeet_compilations_total"),
    } == {
        name: getattr(status, name)
        for name in model_pb2.EngineStatus.DESCRIPTOR.fields_by_name
        if name != "host_adapters"  # counts those on the device, too
    }
    assert found.value("lorikeet_engine_step_duration_seconds_count") == status.steps


async def hold(journal: Journal, prompt: list[int], **options: Any) -> tuple[asyncio.Task[str], list[Any]]:
    """A long request that runs by now; end it with `abort`."""
    pieces: list[Any] = []
    task = asyncio.create_task(journal.stream(prompt, read=pieces, max_tokens=LONG, **options))
    await until(lambda: bool(pieces))
    return task, pieces


async def abort(stack: MeteredStack, *held: tuple[asyncio.Task[str], list[Any]]) -> None:
    """End held requests."""
    for task, pieces in held:
        request = generation_pb2.AbortRequest(request_id=pieces[0].request_id)
        await stack.inference().Abort(request, metadata=stack.auth(), timeout=20)
        assert await task == "aborted"


async def until(condition: Any) -> None:
    """Soon."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_ends_and_tokens(stack: MeteredStack, journal: Journal) -> None:
    """Length, stop token and stop string, streamed and in one reply, each known in advance."""
    assert await journal.stream([33] * 7, max_tokens=5) == "length"
    assert await journal.complete([33] * 7, max_tokens=6) == "length"
    assert await journal.stream([34], max_tokens=9, stop_token_ids=[34]) == "stop_token"
    assert await journal.stream([33], max_tokens=40, stop_strings=["!!!"]) == "stop_string"
    assert await journal.complete([33], max_tokens=40, stop_strings=["!!!!"]) == "stop_string"
    assert (journal.output_tokens, journal.prompt_tokens) == (5 + 6 + 1 + 3 + 4, 7 + 7 + 1 + 1 + 1)


async def test_cached_tokens(stack: MeteredStack, journal: Journal) -> None:
    """A prompt of five blocks and a token, twice: the second time five blocks are there."""
    before = await stack.node_scrape()
    prompt = [1 + i % 50 for i in range(41)]
    assert [await journal.stream(prompt, max_tokens=1) for _ in range(2)] == ["length"] * 2
    assert journal.cached_tokens == 40
    after = await stack.node_scrape()
    name = "lorikeet_prefix_cache_{}_tokens_total"
    assert after.value(name.format("hit")) - before.value(name.format("hit")) == 40
    assert after.value(name.format("query")) - before.value(name.format("query")) == 82


async def test_running_waiting_and_refused(stack: MeteredStack, journal: Journal) -> None:
    """Two run, one waits, the next is refused; a second of the same id, too. Then all end."""
    held = [await hold(journal, [5], request_id="first"), await hold(journal, [6])]
    queued = journal.call([7, 7], max_tokens=3)
    found = await stack.node_shows(lambda s: s.value("lorikeet_requests_waiting") == 1)
    assert found.value("lorikeet_requests_running") == 2
    assert found.value("vllm:num_requests_running", engine="0") == 2
    assert found.value("vllm:num_requests_waiting", engine="0") == 1
    used, capacity = found.value("lorikeet_kv_blocks_used"), found.value("lorikeet_kv_blocks_capacity")
    assert used >= 2
    assert found.value("lorikeet_kv_usage_ratio") == used / capacity
    assert found.value("vllm:kv_cache_usage_perc") == used / capacity
    assert await journal.stream([8], max_tokens=1) == "QUEUE_FULL"
    assert await journal.complete([8], max_tokens=1) == "QUEUE_FULL"
    assert await journal.stream([8], max_tokens=1, request_id="first") == "DUPLICATE_REQUEST"
    assert queued.cancel()
    await stack.node_shows(lambda s: s.value("lorikeet_requests_waiting") == 0)
    journal.cancelled([7, 7], 0)
    late = await journal.stream([9], max_tokens=1, timeout_s=1.5)
    assert late in {"deadline", "DEADLINE_EXCEEDED"}
    await abort(stack, *held)
    assert journal.finished == {"aborted": 2, "cancelled": 1, "deadline": 1}
    assert journal.rejected == {"QUEUE_FULL": 2, "DUPLICATE_REQUEST": 1}


async def test_refusals_by_reason(stack: MeteredStack, journal: Journal) -> None:
    """Each under the reason that the client read."""
    wrong = "lk_" + "x" * 43
    assert await journal.stream([5], token=wrong) == "UNAUTHENTICATED"
    for _ in range(2):
        assert await journal.stream([5], adapter="demo/nobody") == "ADAPTER_NOT_FOUND"
    assert await journal.stream([5], temperature=3.0) == "INVALID_REQUEST"
    assert await journal.complete([5], max_tokens=10**6) == "LIMIT_EXCEEDED"
    assert journal.rejected.total() == 5
    assert not journal.finished
    before = await stack.node_scrape()
    await asyncio.gather(*(journal.stream([5], adapter="nobody") for _ in range(20)))
    after = await stack.node_scrape()
    assert grown(before, after, "lorikeet_rpc_server_errors_total", "reason") == {"ADAPTER_NOT_FOUND": 20}


async def test_a_client_that_leaves_midway(stack: MeteredStack, journal: Journal) -> None:
    """It is counted as cancelled; what was sent after it read is counted as sent."""
    before = await stack.node_scrape()
    call = journal.call([5, 5], max_tokens=LONG)
    for _ in range(3):
        await call.read()
    call.cancel()
    after = await stack.node_shows(
        lambda s: (
            s.value("lorikeet_requests_finished_total", reason="cancelled")
            > before.value("lorikeet_requests_finished_total", reason="cancelled")
        )
    )
    sent = after.value("lorikeet_output_tokens_total") - before.value("lorikeet_output_tokens_total")
    assert 3 <= sent < LONG
    journal.cancelled([5, 5], int(sent))


async def test_loads_and_evictions(stack: MeteredStack, journal: Journal) -> None:
    """Slots for two, host memory for three: a, b, c, d, a. The names that routers see follow."""
    before = await stack.node_scrape()
    for name in ("a", "b", "c", "d", "a"):
        assert await journal.stream([5], adapter=f"demo/{name}", max_tokens=2) == "length"
    after = await stack.node_scrape()
    assert journal.reads == journal.copies == 5
    evictions = grown(before, after, "lorikeet_adapter_evictions_total", "tier")
    assert evictions == {"active": 3, "host": 2}
    assert after.by("lorikeet_adapters_resident", "tier") == {"active": 2, "copying": 0, "host": 1}
    assert names(after, "running") == {"demo/d", "demo/a"}
    digests = await digests_by_name(stack)
    assert {labels["digest"]: labels["tier"] for labels in residency(after)} == {
        digests["d"][:12]: "active",
        digests["a"][:12]: "active",
        digests["c"][:12]: "host",
    }


async def test_unloaded_adapters_disappear(stack: MeteredStack, journal: Journal) -> None:
    """From every label."""
    await journal.stream([5], adapter="demo/a", max_tokens=1)
    for name in ADAPTERS:
        request = adapter_pb2.UnloadAdapterRequest(name=f"demo/{name}")
        await stack.adapters().UnloadAdapter(request, metadata=stack.auth(), timeout=30)
    found = await stack.node_scrape()
    assert not residency(found)
    assert names(found, "running") == names(found, "waiting") == set()
    assert found.value("lorikeet_adapter_arena_used_bytes") == 0
    assert found.value("lorikeet_host_pool_used_bytes") == 0
    assert sum(found.by("lorikeet_adapters_resident", "tier").values()) == 0


async def test_waiting_for_an_adapter(stack: MeteredStack, journal: Journal) -> None:
    """Both slots are leased, a third adapter's request waits for one, and routers see for which."""
    held = [await hold(journal, [5], adapter=f"demo/{name}") for name in ("a", "b")]
    waiting = asyncio.create_task(journal.stream([6], adapter="demo/c", max_tokens=2))
    found = await stack.node_shows(lambda s: s.value("lorikeet_requests_waiting_for_adapter") == 1)
    assert found.value("lorikeet_adapter_leases") == 2
    assert (names(found, "running"), names(found, "waiting")) == ({"demo/a", "demo/b"}, {"demo/c"})
    await abort(stack, *held)
    assert await waiting == "length"
    found = await stack.node_scrape()
    assert names(found, "waiting") == set()
    assert "demo/c" in names(found, "running")


async def test_failed_loads(stack: MeteredStack, journal: Journal, tmp_path: Path) -> None:
    """One whose payload was damaged in the store, one that no slot could hold."""
    before = await stack.node_scrape()
    damaged = await stack.upload(rigs.write_moe_watermark(tmp_path / "e", 20), "demo/damaged")
    spoil(stack, damaged.revision.digest)
    assert await journal.stream([5], adapter="demo/damaged", max_tokens=1) == "ADAPTER_UNAVAILABLE"
    await stack.upload(write_large(tmp_path / "large"), "demo/large")
    assert await journal.stream([5], adapter="demo/large", max_tokens=1) == "ADAPTER_TOO_LARGE"
    after = await stack.node_scrape()
    failures = after.samples("lorikeet_adapter_load_failures_total")
    old = before.samples("lorikeet_adapter_load_failures_total")
    assert {labels: value - old.get(labels, 0) for labels, value in failures.items()} == {
        (("reason", "ADAPTER_PAYLOAD"), ("stage", "read")): 1,
        (("reason", "ADAPTER_TOO_LARGE"), ("stage", "fetch")): 1,
    }


async def test_many_at_once(stack: MeteredStack, journal: Journal) -> None:
    """Two hundred generations for two places, many of them refused: none is lost, none counted twice."""

    async def one(index: int) -> str:
        adapter = (None, "demo/a", "demo/b", "demo/nobody")[index % 4]
        return await journal.stream([index % 60] * (1 + index % 5), adapter=adapter, max_tokens=1 + index % 7)

    # Loaded before, since requests that wait for one load all say that it was not there.
    for adapter in ("demo/a", "demo/b"):
        await journal.stream([5], adapter=adapter, max_tokens=1)
    await asyncio.gather(*(one(index) for index in range(200)))
    assert journal.finished.total() + journal.rejected.total() == 202
    assert journal.rejected["ADAPTER_NOT_FOUND"] == 50


def names(found: Scrape, state: str) -> set[str]:
    """Adapters that a router reads as running or waiting."""
    both = [found.labels(f"{prefix}lora_requests_info") for prefix in ("vllm:", "vllm_")]
    assert both[0] == both[1]
    return set(filter(None, both[0][f"{state}_lora_adapters"].split(",")))


def residency(found: Scrape) -> list[dict[str, str]]:
    """Labels of the residency gauge, all of whose values are 1."""
    samples = found.samples("lorikeet_adapter_residency")
    assert set(samples.values()) <= {1.0}
    return [dict(labels) for labels in samples]


async def digests_by_name(stack: MeteredStack) -> dict[str, str]:
    """Current digests."""
    reply = await stack.adapters().ListAdapters(adapter_pb2.ListAdaptersRequest(), metadata=stack.auth())
    return {adapter.name.rpartition("/")[2]: adapter.current_digest for adapter in reply.adapters}


def spoil(stack: MeteredStack, digest: str) -> None:
    """Change one byte in the middle of a stored payload."""
    path = stack.root / "manager" / "artifacts" / "revisions" / digest / "payload"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def write_large(path: Path) -> Path:
    """Rank 64 on all of attention: more than the arena has."""
    rng, tensors = np.random.default_rng(1), {}
    for layer in range(2):
        for module in ("q_proj", "k_proj", "v_proj", "o_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = rng.standard_normal((64, 64))
            tensors[f"{name}.lora_B.weight"] = rng.standard_normal((64, 64))
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return rigs.write_adapter(path, tensors, r=64, alpha=64, target_modules=modules)
