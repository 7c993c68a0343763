"""What a decode step costs the engine's thread beside the device: `python benchmarks/step_cost.py`.

The real scheduler, batch builder, request table, step buffers, messages and sockets, around a device that
does nothing. Prints microseconds of the thread's processor time a step, medians, by part and by number of
requests; other work on the machine then only counts by the caches it takes.
"""

# Stand-ins take what the real ones take.
# ruff: noqa: ARG002

import argparse
import gc
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import zmq

from inference_service.domain.adapter import AdapterStanding, ResidencyTier
from inference_service.domain.request import EngineRequest
from inference_service.domain.sampling import SamplingParams
from inference_service.engine.channel import Endpoints, EngineSide
from inference_service.engine.messages import StepOutputs
from inference_service.engine.step_pipeline import StepPipeline
from inference_service.execution.backend import make_builder
from inference_service.execution.config import BackendConfig
from inference_service.execution.model_runner import BatchModelRunner
from inference_service.execution.request_table import RequestTable
from inference_service.execution.sampler import SampledOnTheWay
from inference_service.execution.step_shapes import default_sizes
from inference_service.layers.batch import LayerCache
from inference_service.scheduler.config import SchedulerConfig
from inference_service.scheduler.scheduler import Scheduler

BLOCK_TOKENS, CONTEXT, PROMPT = 16, 4096, 1600


class ReadyGate:
    """Every adapter is on the device, in the slot that its digest names."""

    def demand(self, digest: str, request_id: str, now_s: float) -> AdapterStanding:
        """See ports.AdapterGate."""
        return AdapterStanding(ResidencyTier.ACTIVE, can_lease=True)

    def is_ready(self, digest: str) -> bool:
        """See ports.AdapterGate."""
        return True

    def withdraw(self, digest: str, request_id: str) -> None:
        """See ports.AdapterGate."""

    def acquire(self, digest: str, request_id: str, now_s: float) -> int:
        """See ports.AdapterGate."""
        return int(digest)

    def release(self, digest: str, request_id: str, now_s: float) -> None:
        """See ports.AdapterGate."""


class InstantDevice:
    """Forward pass, graphs and sampler in one, which do nothing and choose token 7."""

    def __init__(self, max_requests: int) -> None:
        self.sampled = torch.zeros(max_requests + 1, dtype=torch.int64)
        empty = torch.zeros((2, 1, 1, 1))
        self.cache = (LayerCache(empty, empty),)
        self._tokens = torch.full((max_requests + 8,), 7)

    def run(self, inputs: Any, **_: Any) -> Any:
        """The hidden states of nothing."""
        return inputs

    def logits(self, hidden: Any) -> torch.Tensor:
        """Nobody looks at them."""
        return self._tokens[: hidden.shape.num_samples]

    def logits_of(self, hidden: Any, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Nor at these."""
        return self.logits(hidden)

    def launch(self, logits: torch.Tensor, states: Sequence[Any], batch: Any) -> SampledOnTheWay:
        """Stands for the sampler."""
        return SampledOnTheWay(logits, logits, (), None)


class Clocked:
    """Adds up the time of an object's methods."""

    def __init__(self, inner: Any, seconds: dict[str, float], names: dict[str, str]) -> None:
        self._inner = inner
        self._seconds = seconds
        self._names = names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self._names:
            return found

        def call(*arguments: Any) -> Any:
            begun_s = time.thread_time()
            result = found(*arguments)
            self._seconds[self._names[name]] += time.thread_time() - begun_s
            return result

        return call


def make_scheduler(num_requests: int) -> Scheduler:
    """Room for all at full length."""
    config = SchedulerConfig(
        block_tokens=BLOCK_TOKENS, num_blocks=num_requests * CONTEXT // BLOCK_TOKENS, max_step_tokens=8192,
        max_running_requests=num_requests, max_waiting_requests=1000, max_context_tokens=CONTEXT,
    )  # fmt: skip
    return Scheduler(config, ReadyGate())


def make_runner(num_requests: int) -> BatchModelRunner:
    """The real runner with fixed shapes, as on a GPU."""
    device: Any = InstantDevice(num_requests)
    config = BackendConfig(
        "", block_tokens=BLOCK_TOKENS, max_step_tokens=8192, max_running_requests=num_requests,
        graph_batch_sizes=default_sizes(num_requests),
    )  # fmt: skip
    table = RequestTable(num_requests, CONTEXT, BLOCK_TOKENS)
    builder = make_builder(config, table, device)
    for shape in builder.shapes.all():
        builder.idle(shape)
    return BatchModelRunner(device, device, table, builder, device)


def measure(num_requests: int, num_steps: int, side: EngineSide, reader: Any) -> dict[str, float]:
    """Median microseconds of each part of a turn, and of all of it."""
    seconds: dict[str, float] = defaultdict(float)
    scheduler = make_scheduler(num_requests)
    clocked: Any = Clocked(scheduler, seconds, {"schedule": "schedule", "update": "update"})
    runner: Any = Clocked(make_runner(num_requests), seconds, {"launch": "launch", "collect": "collect"})
    pipeline = StepPipeline(clocked, runner, overlaps=True, on_step=lambda _: None)
    for index in range(num_requests):
        sampling = SamplingParams(max_tokens=CONTEXT - PROMPT, temperature=0.8, top_p=0.95, seed=index)
        prompt = tuple(range(PROMPT))
        scheduler.add(EngineRequest(f"request-{index}", "tenant", prompt, sampling, str(index % 8)), 0.0)
    samples: dict[str, list[float]] = defaultdict(list)
    for turn in range(num_steps):
        seconds.clear()
        begun_s = time.thread_time()
        side.receive()
        received_s = time.thread_time()
        pipeline.turn()
        turned_s = time.thread_time()
        side.send(StepOutputs(tuple(scheduler.take_outputs())))
        ended_s = time.thread_time()
        while reader.poll(0):
            reader.recv()
        if turn < num_steps // 5:
            continue
        parts = {"receive": received_s - begun_s, **seconds, "send": ended_s - turned_s}
        for name, value in {**parts, "whole turn": ended_s - begun_s}.items():
            samples[name].append(value * 1e6)
    return {name: statistics.median(values) for name, values in samples.items()}


def with_sockets(call: Callable[[EngineSide, Any], None]) -> None:
    """The engine's ends of real sockets, and somebody who reads."""
    with tempfile.TemporaryDirectory() as directory:
        endpoints = Endpoints(*(f"ipc://{directory}/{name}" for name in ("in", "out")))
        context = zmq.Context()
        reader = context.socket(zmq.PULL)
        reader.set_hwm(0)
        reader.bind(endpoints.from_engine)
        side = EngineSide(endpoints, ())
        try:
            call(side, reader)
        finally:
            side.close(0)
            reader.close(0)
            context.term()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()
    gc.disable()

    def run(side: EngineSide, reader: Any) -> None:
        for count in arguments.requests:
            found = measure(count, arguments.steps, side, reader)
            print(
                f"{count:4d} requests: " + "  ".join(f"{name} {value:.0f}" for name, value in found.items())
            )

    with_sockets(run)


if __name__ == "__main__":
    main()
