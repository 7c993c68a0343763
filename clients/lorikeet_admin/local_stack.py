"""Both services as child processes with the embedded store: what `lorikeet up` runs."""

import fcntl
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorikeet_admin.child import Child, ChildPlan
from lorikeet_client import AuthError, Lorikeet, LorikeetError, Model, UnavailableError
from lorikeet_rpc.channel import open_channel

_POLL_S = 0.1


class StackError(Exception):
    """The stack cannot start or has failed; the message says why and where to look."""


class StackInterruptedError(Exception):
    """Somebody asked to stop before the stack was ready."""


@dataclass(frozen=True, slots=True)
class StackPlan:
    """What to run. A port of 0 means any free one."""

    model_dir: Path
    data_dir: Path
    inference_port: int
    manager_port: int
    device: str
    dtype: str
    model_name: str
    tenant: str
    # Further flags of the inference service, for runs that need other sizes than a server's.
    inference_flags: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class StackReady:
    """A stack that serves."""

    inference: str
    manager: str
    token: str
    model: str
    data_dir: Path
    logs: dict[str, Path]
    pids: dict[str, int]


class LocalStack:
    """Starts, watches and stops the two services. Use from one thread."""

    def __init__(self, plan: StackPlan) -> None:
        self._plan = plan
        self._children: list[Child] = []
        self._lock: TextIO | None = None

    def start(self, timeout_s: float, should_stop: Callable[[], bool]) -> StackReady:
        """Start both and wait until a request with the tenant's token would be answered.

        Raises:
            StackError: a service ended or was not ready in time.
            StackInterruptedError: `should_stop` came true.
        """
        # The lock first: a second `lorikeet up` in one place finds the default ports taken as well.
        self._lock_data_dir()
        inference, manager = self._addresses()
        self._children = [Child(plan) for plan in self._child_plans(inference, manager)]
        deadline_s = time.monotonic() + timeout_s

        def keep_waiting(what: str) -> None:
            if should_stop():
                raise StackInterruptedError
            self.check()
            if time.monotonic() > deadline_s:
                raise StackError(
                    f"{what} is not ready after {timeout_s:g} s; see {self._plan.data_dir / 'logs'}"
                )
            time.sleep(_POLL_S)

        for child in self._children:
            while not is_serving(child.plan.address):
                keep_waiting(child.plan.name)
        token = (self._plan.data_dir / "manager" / "bootstrap-token").read_text().strip()
        with Lorikeet(inference, manager, token) as client:
            while (model := _model(client)) is None:
                keep_waiting("the catalog on the inference service")
        return StackReady(
            inference=inference,
            manager=manager,
            token=token,
            model=model.name,
            data_dir=self._plan.data_dir,
            logs={child.plan.name: child.plan.log for child in self._children},
            pids={child.plan.name: child.pid for child in self._children},
        )

    def check(self) -> None:
        """Raise StackError if a service has ended."""
        for child in self._children:
            if (status := child.exit_status()) is not None:
                ended = f"was ended by signal {-status}" if status < 0 else f"ended with exit code {status}"
                raise StackError(
                    f"{child.plan.name} {ended}; the end of {child.plan.log}:\n{child.log_tail()}"
                )

    def stop(self, grace_s: float) -> bool:
        """Stop the manager, then the inference service; False if one had to be killed."""
        clean = [child.stop(grace_s) for child in reversed(self._children)]
        if self._lock:
            self._lock.close()
        return all(clean)

    def kill(self) -> None:
        """Stop everything at once."""
        for child in self._children:
            child.kill()

    def _addresses(self) -> tuple[str, str]:
        ports = (self._plan.inference_port, self._plan.manager_port)
        # Both sockets stay open until both ports are known: the same free port cannot come twice.
        probes = [_probe(port) for port in ports]
        addresses = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
        for probe in probes:
            probe.close()
        return addresses[0], addresses[1]

    def _lock_data_dir(self) -> None:
        # Two managers on one store would overwrite each other's registry.
        self._plan.data_dir.mkdir(parents=True, exist_ok=True)
        self._lock = (self._plan.data_dir / "up.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StackError(
                f"{self._plan.data_dir} is in use by another `lorikeet up`: stop it, "
                "or give another --data-dir"
            ) from error

    def _child_plans(self, inference: str, manager: str) -> tuple[ChildPlan, ChildPlan]:
        plan = self._plan
        logs = plan.data_dir / "logs"
        logs.mkdir(exist_ok=True)
        node_token = secrets.token_urlsafe(32)
        node = (
            "--listen",
            inference,
            "--model-dir",
            str(plan.model_dir),
            "--data-dir",
            str(plan.data_dir / "node"),
        )
        return (
            ChildPlan(
                name="inference",
                module="inference_service",
                arguments=(
                    *node,
                    "--device",
                    plan.device,
                    "--dtype",
                    plan.dtype,
                    *_named(plan.model_name),
                    *plan.inference_flags,
                ),
                secrets={"INFERENCE_NODE_TOKEN": node_token},
                address=inference,
                log=logs / "inference.log",
            ),
            ChildPlan(
                name="manager",
                module="adapter_manager",
                arguments=(
                    *("--listen", manager, "--data-dir", str(plan.data_dir / "manager")),
                    *("--nodes", inference, "--bootstrap-tenant", plan.tenant),
                ),
                secrets={"ADAPTER_MANAGER_NODE_TOKEN": node_token},
                address=manager,
                log=logs / "manager.log",
            ),
        )


def _named(model_name: str) -> tuple[str, ...]:
    return ("--model-name", model_name) if model_name else ()


def _probe(port: int) -> socket.socket:
    probe = socket.socket()
    try:
        # As the servers will: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    except OSError as error:
        probe.close()
        raise StackError(
            f"port {port} is taken ({error.strerror}): give another with --inference-port or --manager-port, "
            "or 0 for any free one"
        ) from error
    return probe


def free_address() -> str:
    """A loopback address whose port nobody has."""
    with _probe(0) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def is_serving(address: str) -> bool:
    """Whether a service's health says SERVING there."""
    with open_channel(address, aio=False) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its types name no methods
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError:
            return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING


def _model(client: Lorikeet) -> Model | None:
    """The model; None while the node has no catalog from the manager, or one without the token's hash."""
    try:
        return client.get_model(timeout_s=5)
    except (AuthError, UnavailableError):
        return None
    except LorikeetError as error:
        raise StackError(f"the inference service does not answer: {error}") from error
