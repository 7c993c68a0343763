"""Stages of a node's work at which faults come: brought about with real calls, and held there."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.node_world import NodeWorld, Outcome

Calls = list[Coroutine[Any, Any, Outcome]]
WATERMARKS = {"demo/a": 11, "demo/b": 22, "demo/cold": 33, "demo/wanted": 44}
WANTED = "demo/wanted"  # the manager wants it on the device throughout
WARM: tuple[str | None, ...] = ("demo/a", "demo/b", None)


@dataclass(frozen=True)
class Stage:
    """What goes on when the fault comes: `calls` are begun, and held at `gate` (or by a store that hangs).

    But for an idle node three streams run beside them, on resident adapters and on the base.
    """

    name: str
    calls: Callable[[NodeWorld], Calls] = lambda _: []
    gate: str = ""
    is_store_hung: bool = False
    is_idle: bool = False

    def __str__(self) -> str:
        return self.name


STAGES = (
    Stage("idle", is_idle=True),
    Stage("prefill", lambda w: [w.stream("demo/a", prompt_tokens=100).ended()], gate="prefill"),
    Stage("decode", gate="decode"),
    Stage("adapter fetch", lambda w: [w.ask("demo/cold")], is_store_hung=True),
    Stage("host read", lambda w: [w.ask("demo/cold"), w.load("demo/cold")], gate="read"),
    Stage("arena copy", lambda w: [w.ask("demo/cold"), w.load("demo/cold")], gate="copy"),
    Stage("unload", lambda w: [w.unload("demo/a")]),
)


@asynccontextmanager
async def at_stage(world: NodeWorld, stage: Stage) -> AsyncIterator[list[Outcome]]:
    """Inside, the node is at the stage. At the end all is let go; then the list has how each call ended."""
    outcomes: list[Outcome] = []
    for name in ("demo/a", "demo/b"):
        assert (await world.ask(name)).is_whole
    await world.unloaded("demo/cold")
    assert not await world.stack.at_rest()
    streams = [] if stage.is_idle else [world.stream(name) for name in WARM]
    for stream in streams:
        await stream.started()
    with _held(world, stage) as is_there:
        calls = [asyncio.create_task(call) for call in stage.calls(world)]
        await is_there()
        yield outcomes
    outcomes += [await stream.ended() for stream in streams]
    outcomes += [await call for call in calls]


@contextmanager
def _held(world: NodeWorld, stage: Stage) -> Generator[Callable[[], Awaitable[None]]]:
    """Holds who comes to the stage, and lets go at the end; yields the wait until somebody is there."""
    if stage.is_store_hung:
        with world.hung_store("demo/cold") as is_read:
            yield is_read
        return
    if stage.gate:
        world.gates.hold(stage.gate)
    try:
        # Without a gate the calls only need to have arrived: they wait for the streams.
        yield (lambda: world.gates.reached(stage.gate)) if stage.gate else (lambda: asyncio.sleep(0.3))
    finally:
        world.gates.release_all()
