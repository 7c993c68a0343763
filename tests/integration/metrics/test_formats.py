"""Both endpoints in every format that scrapers ask for, read with prometheus_client's own parsers."""

import asyncio
import gzip
import socket
import time
import urllib.request
from dataclasses import dataclass

import pytest

from tests.support.metered_stack import MeteredStack
from tests.support.scrapes import OPENMETRICS, PROMETHEUS, Scrape, scrape

pytestmark = pytest.mark.asyncio(loop_scope="session")

FORMATS = {
    "nothing negotiated": None,
    "text": "text/plain",
    "text 0.0.4": "text/plain; version=0.0.4",
    "text 1.0.0": "text/plain; version=1.0.0",
    "text 1.0.0, utf-8": "text/plain; version=1.0.0; escaping=allow-utf-8",
    "openmetrics": "application/openmetrics-text",
    "openmetrics 1.0.0": OPENMETRICS,
    "openmetrics 1.0.0, underscores": f"{OPENMETRICS}; escaping=underscores",
    "openmetrics 1.0.0, utf-8": f"{OPENMETRICS}; escaping=allow-utf-8",
    "openmetrics 1.0.0, dots": f"{OPENMETRICS}; escaping=dots",
    "openmetrics 1.0.0, values": f"{OPENMETRICS}; escaping=values",
    "a newer openmetrics": "application/openmetrics-text; version=2.0.0; escaping=allow-utf-8",
    "prometheus 3": PROMETHEUS,
    "anything": "*/*",
}


@dataclass(frozen=True)
class Routing:
    """What an inference gateway takes from one scrape: its queue, its batch, its cache, its adapters."""

    waiting: float
    running: float
    kv_usage: float
    max_adapters: int
    active: frozenset[str]
    queued: frozenset[str]
    block_tokens: int
    num_blocks: int


def read_as_router(found: Scrape, prefix: str) -> Routing:
    """By name alone, as the endpoint picker does: the newest of the LoRA series, lists split at commas."""
    lora = max(found.samples(f"{prefix}lora_requests_info").items(), key=lambda item: item[1])
    labels = dict(lora[0])
    assert abs(lora[1] - time.time()) < 300, "the value is a date"
    cache = found.labels(f"{prefix}cache_config_info")
    model = {"engine": "0", "model_name": "rig"}
    return Routing(
        waiting=found.value(f"{prefix}num_requests_waiting", **model),
        running=found.value(f"{prefix}num_requests_running", **model),
        kv_usage=found.value(f"{prefix}kv_cache_usage_perc", **model),
        max_adapters=int(labels["max_lora"]),
        active=frozenset(filter(None, labels["running_lora_adapters"].split(","))),
        queued=frozenset(filter(None, labels["waiting_lora_adapters"].split(","))),
        block_tokens=int(cache["block_size"]),
        num_blocks=int(cache["num_gpu_blocks"]),
    )


@pytest.mark.parametrize("accept", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("prefix", ["vllm:", "vllm_"])
async def test_a_router_finds_its_values(metered: MeteredStack, accept: str | None, prefix: str) -> None:
    """In whatever format, under either spelling."""
    limits = (await metered.model()).limits
    status = await metered.status()
    routing = read_as_router(await metered.node_scrape(accept), prefix)
    assert routing == Routing(
        waiting=0,
        running=0,
        kv_usage=0,
        max_adapters=limits.max_active_adapters,
        active=frozenset({"demo/w10", "demo/w10@prod"}),
        queued=frozenset(),
        block_tokens=16,
        num_blocks=status.kv_blocks_total,
    )


@pytest.mark.parametrize("accept", FORMATS.values(), ids=FORMATS)
async def test_formats_hold_the_same(metered: MeteredStack, accept: str | None) -> None:
    """Families, their types and their samples' names and labels are those of plain text, on both services."""
    for read in (metered.node_scrape, metered.manager_scrape):
        plain, other = await read(), await read(accept)
        assert _shape(other) == _shape(plain)
        assert len(_shape(plain)) > 20


async def test_nothing_negotiated_is_plain_text(metered: MeteredStack) -> None:
    """As the endpoint picker asks, with the names as vLLM writes them, colon and all."""
    for read in (metered.node_scrape, metered.manager_scrape):
        assert (await read()).content_type == "text/plain; version=0.0.4; charset=utf-8"
    text = (await metered.node_scrape()).text
    assert '\nvllm:num_requests_running{engine="0",model_name="rig"} 0.0\n' in text


async def test_the_answer_says_its_format(metered: MeteredStack) -> None:
    """OpenMetrics where that was asked for, closed by its mark."""
    for read in (metered.node_scrape, metered.manager_scrape):
        found = await read(PROMETHEUS)
        assert found.content_type.startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
        assert found.text.endswith("# EOF\n")


async def test_a_part_and_compressed(metered: MeteredStack) -> None:
    """`name[]` picks families; gzip where the scraper takes it."""
    part = await asyncio.to_thread(
        scrape, metered.node_metrics, None, "?name[]=vllm:num_requests_running&name[]=lorikeet_engine_up"
    )
    assert set(part.families) == {"vllm:num_requests_running", "lorikeet_engine_up"}

    def compressed() -> bytes:
        request = urllib.request.Request(
            f"http://{metered.node_metrics}/metrics", headers={"Accept-Encoding": "gzip"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            assert response.headers["Content-Encoding"] == "gzip"
            return gzip.decompress(response.read())

    assert b"lorikeet_engine_up 1.0" in await asyncio.to_thread(compressed)


async def test_who_connects_and_says_nothing_is_in_nobodys_way(metered: MeteredStack) -> None:
    """A scrape is served beside twenty silent connections."""
    host, _, port = metered.node_metrics.rpartition(":")
    silent = [socket.create_connection((host, int(port)), timeout=10) for _ in range(20)]
    try:
        assert (await metered.node_scrape()).value("lorikeet_engine_up") == 1
    finally:
        for connection in silent:
            connection.close()


async def test_no_secret_and_no_prompt_is_shown(metered: MeteredStack) -> None:
    """Neither tokens nor what was asked or answered."""
    await metered.generate("\x01\x02\x03", max_tokens=2)
    for read in (metered.node_scrape, metered.manager_scrape):
        text = (await read()).text
        assert metered.token not in text
        assert "test-node-token" not in text
        assert "\x01" not in text


def _shape(found: Scrape) -> dict[str, object]:
    return {
        name: (family.type, frozenset((s.name, tuple(sorted(s.labels))) for s in family.samples))
        for name, family in found.families.items()
    }
