"""The front end's eye on its engine process: stalls, words that it does not understand, starts that fail."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from inference_service.domain.errors import EngineDeadError
from inference_service.engine import supervisor
from inference_service.engine.messages import FromEngine
from lorikeet_contract.status import ServiceError
from tests.integration.engine.test_engine_process import collect, eventually, make_config, running
from tests.support.engine_builders import make_request
from tests.support.fake_device import expected_tokens


async def test_a_stalled_engine_is_replaced(tmp_path: Path) -> None:
    """Stopped, it is not dead and not alive: its stream ends in time, and the next engine answers."""
    async with running(make_config(tmp_path, "step_s=0.005", stall_timeout_s=1.0)) as engine:
        outputs = engine.generate(make_request("victim", max_tokens=390))
        await anext(outputs)
        assert engine._process is not None
        os.kill(engine._process._process.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError):
            async with asyncio.timeout(30):
                async for _ in outputs:
                    pass

        async def is_back() -> bool:
            return engine.is_alive

        await eventually(is_back, 30)
        tokens, _ = await collect(engine, make_request("after"))
        assert tokens == expected_tokens(None, (1, 2, 3), 4)


async def test_a_quiet_or_slow_engine_is_left_alone(tmp_path: Path) -> None:
    """Idle for longer than the stall timeout, or busy with a step of most of it: the same life goes on."""
    async with running(make_config(tmp_path, "step_s=0.5", stall_timeout_s=0.8)) as engine:
        life = engine.instance_id
        await asyncio.sleep(2.0)
        tokens, _ = await collect(engine, make_request("slow", max_tokens=3))
        assert tokens == expected_tokens(None, (1, 2, 3), 3)
        assert engine.instance_id == life


async def test_an_engine_that_is_not_understood_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests end, and supervision goes on."""
    async with running(make_config(tmp_path, "step_s=0.005", log_level="critical")) as engine:
        route = engine._route

        def confused(message: FromEngine) -> None:
            monkeypatch.setattr(engine, "_route", route)
            raise ValueError(message)

        life = engine.instance_id
        outputs = engine.generate(make_request("victim", max_tokens=390))
        await anext(outputs)
        monkeypatch.setattr(engine, "_route", confused)
        with pytest.raises(EngineDeadError):
            async for _ in outputs:
                pass

        async def is_back() -> bool:
            return engine.is_alive

        await eventually(is_back, 30)
        assert engine.instance_id != life
        tokens, _ = await collect(engine, make_request("after"))
        assert tokens == expected_tokens(None, (1, 2, 3), 4)


async def test_a_message_that_cannot_be_decoded_ends_nobody_else(tmp_path: Path) -> None:
    """Neither the engine nor its other requests: the one that it belongs to fails, or nobody's is dropped."""
    async with running(make_config(tmp_path, "step_s=0.005", log_level="critical")) as engine:
        life = engine.instance_id
        neighbour = asyncio.create_task(collect(engine, make_request("neighbour", max_tokens=200)))
        odd: Any = 6.5
        with pytest.raises(ServiceError, match="could not read this request") as caught:
            await collect(engine, make_request("odd", max_tokens=odd))
        assert caught.value.reason == ServiceError.reason
        with pytest.raises(ServiceError, match="could not read this request"):
            await engine.refuse_demand(odd, "because")
        assert engine._process is not None
        outbox = engine._process._side._outbox
        for frame in (b"", b"\xc1", b"\x81\xa4type\xa5Bogus", b"\x91" * 5000):
            outbox.send(frame)
        tokens, _ = await neighbour
        assert tokens == expected_tokens(None, (1, 2, 3), 200)
        assert (engine.instance_id, engine.num_restarts) == (life, 0)
        assert (await engine.status()).running_requests == 0


async def test_a_request_that_cannot_be_encoded_leaves_nothing(tmp_path: Path) -> None:
    """Its id is free again, and an ending does not wait for it."""
    async with running(make_config(tmp_path, log_level="critical")) as engine:
        with pytest.raises(OverflowError):
            await collect(engine, make_request("r", seed=2**64))
        tokens, _ = await collect(engine, make_request("r"))
        assert tokens == expected_tokens(None, (1, 2, 3), 4)
        assert await engine.drain(10) == 0


async def test_a_spawn_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptors, no disk for the sockets: not the end of supervision."""
    async with running(make_config(tmp_path, log_level="critical")) as engine:
        failures = [OSError(24, "Too many open files"), OSError(28, "No space left on device")]
        spawn = supervisor._spawn

        async def failing(config: object) -> object:
            if failures:
                raise failures.pop()
            return await spawn(config)  # type: ignore[arg-type]

        monkeypatch.setattr(supervisor, "_spawn", failing)
        assert engine._process is not None
        os.kill(engine._process._process.pid, signal.SIGKILL)

        async def is_back() -> bool:
            return engine.is_alive and not failures

        await eventually(is_back, 30)
        tokens, _ = await collect(engine, make_request("after"))
        assert tokens == expected_tokens(None, (1, 2, 3), 4)
