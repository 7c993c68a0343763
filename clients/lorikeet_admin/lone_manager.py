"""An adapter manager as a child process over nodes that are there already."""

import secrets
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lorikeet_admin.child import Child, ChildPlan
from lorikeet_admin.local_stack import StackError, StackInterruptedError

_POLL_S = 0.05
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class RunningManager:
    """Where it is. `metrics` is the URL of its Prometheus endpoint."""

    address: str
    token: str
    pid: int
    metrics: str


@contextmanager
def lone_manager(
    data_dir: Path, node: str, tenant: str, is_ready: Callable[[], bool], should_stop: Callable[[], bool]
) -> Generator[RunningManager]:
    """A manager with its embedded registry and store in `data_dir`, stopped at the end.

    Args:
        data_dir: new or empty.
        node: the address of the one node.
        tenant: made, with the token that is handed out.
        is_ready: asked until it is true; the manager serves then.
        should_stop: asked while waiting.

    Raises:
        StackError: it ended before it was ready.
        StackInterruptedError: `should_stop` came true.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    listen, metrics = _free_addresses()
    child = Child(
        ChildPlan(
            name="manager",
            module="adapter_manager",
            arguments=(
                *("--listen", listen, "--metrics-listen", metrics, "--data-dir", str(data_dir)),
                *("--nodes", node, "--bootstrap-tenant", tenant),
            ),
            secrets={"ADAPTER_MANAGER_NODE_TOKEN": secrets.token_urlsafe(32)},
            address=listen,
            log=data_dir / "manager.log",
        )
    )
    try:
        while not is_ready():
            if should_stop():
                raise StackInterruptedError
            if (status := child.exit_status()) is not None:
                raise StackError(f"the manager ended with exit code {status}:\n{child.log_tail()}")
            time.sleep(_POLL_S)
        token = (data_dir / "bootstrap-token").read_text().strip()
        yield RunningManager(listen, token, child.pid, f"http://{metrics}/metrics")
    finally:
        child.stop(_STOP_S)


def _free_addresses() -> tuple[str, str]:
    # Both sockets stay open until both ports are known: the same free port cannot come twice.
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{first.getsockname()[1]}", f"127.0.0.1:{second.getsockname()[1]}"
