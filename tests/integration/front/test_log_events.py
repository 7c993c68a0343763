"""What one generation leaves in the log, and what an engine that fails does."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from inference_service.domain.errors import EngineDeadError
from inference_service.engine.config import EngineConfig
from inference_service.engine.engine_client import EngineClient
from lorikeet.inference.v1 import generation_pb2
from tests.support import engine_builders
from tests.support.fake_backend import FACTORY, FAULTY_TOKEN
from tests.support.node import ACME, auth, finished, make_request, run_node

FINISHED = {"event": "request.finished", "method": "/lorikeet.inference.v1.InferenceService/Generate"}


def of(events: list[Any], name: str) -> list[dict[str, Any]]:
    """Events of one name."""
    return [event for event in events if event["event"] == name]


async def test_a_generation_from_its_start_to_its_end(tmp_path: Path) -> None:
    """Accepted, first token, finished: once each, and the last has where the time went."""
    async with run_node(tmp_path) as node:
        with structlog.testing.capture_logs() as events:
            await finished(node.inference.Generate(make_request("ab", max_tokens=3), metadata=auth(ACME)))
            await asyncio.wait_for(node.node._interceptor.idle(), 30)
    (accepted,), (first,) = of(events, "request.accepted"), of(events, "request.first_token")
    assert accepted["log_level"] == first["log_level"] == "debug"
    (end,) = (e for e in events if e.items() >= FINISHED.items())
    assert (end["log_level"], end["finish_reason"], end["output_tokens"]) == ("info", "length", 3)
    assert first["ms"] == end["first_token_ms"] > 0
    parts = ("queue_ms", "adapter_wait_ms", "prefill_ms", "decode_ms")
    assert [end[part] for part in parts] == [1, 2, 3, 4]
    assert end["cached_tokens"] == 1


async def test_a_refused_generation(tmp_path: Path) -> None:
    """Its one line is a warning with the reason and without the words."""
    async with run_node(tmp_path) as node:
        with structlog.testing.capture_logs() as events:
            call = node.inference.Generate(
                make_request("secret words", adapter="acme/nobody"), metadata=auth(ACME)
            )
            with pytest.raises(grpc.aio.AioRpcError):
                await finished(call)
            await asyncio.wait_for(node.node._interceptor.idle(), 30)
    (line,) = (e for e in events if e["event"].startswith("request."))
    assert line.items() >= FINISHED.items()
    assert (line["log_level"], line["reason"]) == ("warning", "ADAPTER_NOT_FOUND")
    assert "secret" not in str(events)


async def test_an_aborted_generation(tmp_path: Path) -> None:
    """By name, once; an id that nobody has is none."""
    async with run_node(tmp_path) as node:
        request = make_request("ab", max_tokens=5000, request_id="mine")
        with structlog.testing.capture_logs() as events:
            call = node.inference.Generate(request, metadata=auth(ACME))
            await call.read()
            for name in ("mine", "nobodys"):
                abort = generation_pb2.AbortRequest(request_id=name)
                await node.inference.Abort(abort, metadata=auth(ACME))
            await finished(call)
    assert [event["generation_id"] for event in of(events, "request.aborted")] == ["mine"]


def make_config(tmp_path: Path, model: str = "") -> EngineConfig:
    """A real engine process on a fake device, logging JSON."""
    return EngineConfig(
        model_dir=model, disk_cache_dir=str(tmp_path / "cache"), backend_factory=FACTORY, log_json=True,
        num_blocks=64, max_context_tokens=100,
    )  # fmt: skip


def errors_in(text: str) -> dict[str, str]:
    """Error events among the JSON lines, with their tracebacks."""
    records = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {r["event"]: r.get("exception", "") for r in records if r["level"] == "error"}


async def test_a_step_that_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The engine process says so with its traceback before it ends."""
    engine = await EngineClient.start(make_config(tmp_path))
    try:
        with pytest.raises(EngineDeadError):
            async for _ in engine.generate(engine_builders.make_request(prompt=[FAULTY_TOKEN])):
                pass
    finally:
        await engine.close()
    found = errors_in(capfd.readouterr().err)
    assert "the device fell off the bus" in found["engine.step_failed"]
    assert "engine.start_failed" not in found


async def test_an_engine_that_cannot_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Another event: there was no step."""
    with pytest.raises(EngineDeadError):
        await EngineClient.start(make_config(tmp_path, "fail=1"))
    found = errors_in(capfd.readouterr().err)
    assert "the model directory is empty" in found["engine.start_failed"]
    assert "engine.step_failed" not in found
