"""All servers of one `lorikeet bench serve`, one after the other."""

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lorikeet_admin.bench_loop import run_bench
from lorikeet_admin.bench_node import bench_node
from lorikeet_admin.load_report import progress_text
from lorikeet_admin.output import Output
from lorikeet_admin.session import Connection
from lorikeet_bench.engine.plan import EnginePlan
from lorikeet_bench.engine.routing_probe import probe_routing
from lorikeet_bench.engine.settings import node_flags, runs_on_gpu
from lorikeet_bench.gpu import gpu_name
from lorikeet_bench.load.generated_adapters import AdapterShape, AdapterStore
from lorikeet_bench.load.metrics import LoadSummary
from lorikeet_bench.load.result import PointResult, ServerFacts
from lorikeet_bench.load.rig_tokens import RigTokens
from lorikeet_bench.load.sweep import Sweep
from lorikeet_bench.serve.adapters import check_named, uploaded_adapters, write_store
from lorikeet_bench.serve.catalog import TENANT, push_catalog
from lorikeet_bench.serve.run import ServedAdapters, ServeOutcome, run_serve_bench
from lorikeet_bench.serve.target import NodeAddress


@dataclass(slots=True)
class ServeBench:
    """Collects servers and points; `directory` is for adapters and logs.

    Methods raise LoadError, StackError, CallError or AioRpcError where a server refuses or cannot start.
    """

    directory: Path
    adapters: AdapterShape
    with_text: bool
    probe_steps: int
    output: Output
    servers: list[ServerFacts] = field(default_factory=list[ServerFacts])
    points: list[PointResult] = field(default_factory=list[PointResult])

    def on_running(self, connection: Connection, sweep: Sweep, names: Sequence[str], upload_to: str) -> None:
        """Load a node that somebody else started.

        Args:
            connection: where it is, and as whom.
            sweep: the points.
            names: adapters that are there.
            upload_to: the token's tenant, which gets generated adapters meanwhile; "" for none.
        """
        node = NodeAddress(connection.inference, connection.token or "", connection.tls)

        async def run() -> ServeOutcome:
            if not upload_to:
                await check_named(node, names)
                return await self._run(node, sweep, ServedAdapters(tuple(names)))
            count = max(sweep.adapters)
            async with uploaded_adapters(
                node, connection.manager, upload_to, self.directory, self.adapters, count
            ) as served:
                return await self._run(node, sweep, served)

        self._add(run_bench(run()), sweep, device="", startup_s=None, load_s=None)

    def on_own_node(self, plan: EnginePlan, sweep: Sweep) -> None:
        """Start a node, name `plan.slots` generated adapters to it, load it, stop it."""
        tokens = None if plan.rig is None else RigTokens(plan.rig, plan.slots)
        with bench_node(self.directory, node_flags(plan)) as node:
            address = NodeAddress(node.address, secrets.token_urlsafe(32))

            async def run() -> tuple[ServeOutcome, float]:
                # First the tenant alone: the model's schema, by which adapters are made, is shown to it only.
                await push_catalog(node.address, node.node_token, address.token, AdapterStore("", ()))
                store = AdapterStore("", ())
                if plan.slots:
                    place = self.directory / "store"
                    store = await write_store(address, place, self.adapters, plan.slots, tokens)
                load_s = await push_catalog(node.address, node.node_token, address.token, store)
                names = tuple(f"{TENANT}/{adapter.name}" for adapter in store.adapters)
                digests = tuple(adapter.digest for adapter in store.adapters)
                return await self._run(address, sweep, ServedAdapters(names, digests, tokens)), load_s

            outcome, load_s = run_bench(run())
        self._add(
            outcome,
            sweep,
            device=gpu_name() if runs_on_gpu(plan) else "cpu",
            startup_s=node.startup_s,
            load_s=load_s if plan.slots else None,
        )
        if self.probe_steps and not self.with_text:
            self._probe(plan, sweep, outcome, () if tokens is None else tokens.forced)

    def _probe(self, plan: EnginePlan, sweep: Sweep, outcome: ServeOutcome, tokens: tuple[int, ...]) -> None:
        found = run_bench(probe_routing(plan, sweep.plans(), outcome.samples, self.probe_steps, tokens))
        begin = len(self.points) - len(found)
        for index, routing in enumerate(found, begin):
            self.points[index] = replace(self.points[index], routing=routing)

    async def _run(self, node: NodeAddress, sweep: Sweep, served: ServedAdapters) -> ServeOutcome:
        def on_point(name: str, summary: LoadSummary) -> None:
            self.output.note(progress_text(name, summary))

        return await run_serve_bench(node, sweep, served, with_text=self.with_text, on_point=on_point)

    def _add(
        self,
        outcome: ServeOutcome,
        sweep: Sweep,
        *,
        device: str,
        startup_s: float | None,
        load_s: float | None,
    ) -> None:
        before, after = outcome.before, outcome.after
        self.points.extend(outcome.points)
        self.servers.append(
            ServerFacts(
                model=after.name,
                dtype=after.dtype,
                device=device,
                slots=max(sweep.adapters),
                startup_s=startup_s,
                adapter_bytes=after.status.arena_used_bytes // max(1, after.status.active_adapters),
                adapter_load_s=load_s,
                compilations=after.status.compilations,
                preemptions=after.status.preemptions - before.status.preemptions,
                settings=asdict(after.limits),
            )
        )
