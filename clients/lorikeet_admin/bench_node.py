"""A node for a bench: one inference service as a child process, without a manager."""

import secrets
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lorikeet_admin.child import Child, ChildPlan
from lorikeet_admin.local_stack import StackError, free_address, is_serving

_START_S = 600.0
_STOP_S = 30.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class BenchNode:
    """A node that serves. `startup_s` is from spawning the process to SERVING."""

    address: str
    node_token: str = field(repr=False)
    startup_s: float
    log: Path


@contextmanager
def bench_node(directory: Path, flags: Sequence[str]) -> Generator[BenchNode]:
    """Start a node with these flags; stops it at the end.

    Raises:
        StackError: it ended, or did not serve in time; the message holds the end of its log.
    """
    directory.mkdir(parents=True, exist_ok=True)
    address, token = free_address(), secrets.token_urlsafe(32)
    plan = ChildPlan(
        name="inference",
        module="inference_service",
        arguments=("--listen", address, "--data-dir", str(directory / "node"), *flags),
        secrets={"INFERENCE_NODE_TOKEN": token},
        address=address,
        log=directory / "node.log",
    )
    begun_s = time.perf_counter()
    child = Child(plan)
    try:
        while not is_serving(address):
            if (status := child.exit_status()) is not None:
                raise StackError(f"the node ended with exit code {status}:\n{child.log_tail()}")
            if time.perf_counter() - begun_s > _START_S:
                raise StackError(f"the node does not serve after {_START_S:g} s:\n{child.log_tail()}")
            time.sleep(_POLL_S)
        yield BenchNode(address, token, time.perf_counter() - begun_s, plan.log)
    finally:
        child.stop(_STOP_S)
