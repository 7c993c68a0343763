"""The real backend with gates before its steps, reads and copies, and a start that a test can let fail.

Points: "prefill" and "decode" (the step loop), "read" (a worker thread), "copy" (copies do not end), and
"start": an engine that comes there ends at once. Each start is a line in the file `starts`.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_service.domain.engine import ModelFacts
from inference_service.domain.step import ModelRunnerOutput, SchedulerOutput
from inference_service.execution.backend import load_backend
from inference_service.execution.config import BackendConfig
from inference_service.ports import DeviceArena, HostPool, ModelRunner
from lorikeet_contract.manifest import Manifest
from tests.support.gates import VARIABLE, is_held, wait_at

FACTORY = "tests.support.gated_backend:load"
STARTS = "starts"


@dataclass(frozen=True)
class GatedRunner:
    """Satisfies ports.ModelRunner."""

    inner: ModelRunner

    @property
    def is_asynchronous(self) -> bool:
        """See ports.ModelRunner."""
        return self.inner.is_asynchronous

    def launch(self, step: SchedulerOutput) -> None:
        """Wait at the step's kind of gate, then run it."""
        is_prefill = any(share.num_scheduled_tokens > 1 for share in step.scheduled)
        wait_at("prefill" if is_prefill else "decode")
        self.inner.launch(step)

    def collect(self) -> ModelRunnerOutput:
        """See ports.ModelRunner."""
        return self.inner.collect()


@dataclass(frozen=True)
class GatedPool:
    """Satisfies ports.HostPool."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self, manifest: Manifest, payload_path: str) -> int:
        """Wait, then read."""
        wait_at("read")
        return self.inner.read(manifest, payload_path)


class GatedArena:
    """Satisfies ports.DeviceArena."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._copying: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin_copy(self, digest: str, slot: int) -> bool:
        """Begin."""
        has_begun = self.inner.begin_copy(digest, slot)
        if has_begun:
            self._copying.add(slot)
        return has_begun

    def poll(self) -> Sequence[int]:
        """Nothing ends while a copy is held."""
        if self._copying and is_held("copy"):
            return ()
        done = self.inner.poll()
        self._copying -= set(done)
        return done

    def release(self, slot: int) -> None:
        """Empty a slot."""
        self._copying.discard(slot)
        self.inner.release(slot)


@dataclass(frozen=True)
class GatedBackend:
    """Satisfies ports.Backend."""

    inner: Any
    info: ModelFacts
    runner: ModelRunner
    host_pool: HostPool
    arena: DeviceArena

    def compilations(self) -> int:
        """See ports.Backend."""
        return self.inner.compilations()


def load(config: BackendConfig) -> GatedBackend:
    """The factory; `EngineConfig.backend_factory` names it."""
    with (Path(os.environ[VARIABLE]) / STARTS).open("a") as file:
        file.write(f"{time.monotonic()}\n")
    if is_held("start"):
        raise ValueError("the device does not answer")
    inner = load_backend(config)
    pool: Any = GatedPool(inner.host_pool)
    arena: Any = GatedArena(inner.arena)
    return GatedBackend(inner, inner.info, GatedRunner(inner.runner), pool, arena)
