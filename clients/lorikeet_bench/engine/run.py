"""A whole bench of the engine: start, load adapters, warm up, measure, look at the routing."""

from collections.abc import Callable
from dataclasses import replace

from inference_service.domain.errors import EngineDeadError
from lorikeet_bench.engine.launch import LoadedEngine, loaded_engine
from lorikeet_bench.engine.plan import EnginePlan
from lorikeet_bench.engine.routing_probe import probe_routing
from lorikeet_bench.engine.settings import runs_on_gpu, settings_facts
from lorikeet_bench.engine.target import EngineTarget
from lorikeet_bench.gpu import gpu_name
from lorikeet_bench.load.driver import LoadOutcome, run_load
from lorikeet_bench.load.judge import Expectation
from lorikeet_bench.load.lengths import LoadError
from lorikeet_bench.load.metrics import LoadSummary
from lorikeet_bench.load.plan import LoadPlan
from lorikeet_bench.load.prompts import TokenPrompts
from lorikeet_bench.load.result import PointResult, ServerFacts
from lorikeet_bench.load.rig_tokens import RigTokens
from lorikeet_bench.load.samples import SampleKeeper
from lorikeet_bench.load.sweep import Sweep, run_points

# What token prompts leave out at the vocabulary's low end: on tiny vocabularies nothing, 0 is often padding.
_FIRST_TOKEN = 1


async def run_engine_bench(
    plan: EnginePlan,
    sweep: Sweep,
    *,
    probe_steps: int = 0,
    on_point: Callable[[str, LoadSummary], None] = lambda _name, _summary: None,
) -> tuple[ServerFacts, tuple[PointResult, ...]]:
    """Measure every point of `sweep` on one engine with `plan.slots` adapters.

    Args:
        plan: the engine.
        sweep: the points; each asks for at most `plan.slots` adapters.
        probe_steps: decode steps whose routing is looked at for each point, afterwards and in an engine of
            its own without graphs; 0 looks at none.
        on_point: called after each run of a point.

    Raises:
        LoadError: the engine could not start or died; the message says why.
    """
    rig = None if plan.rig is None else RigTokens(plan.rig, plan.slots)
    forced = () if rig is None else rig.forced
    keeper = SampleKeeper()
    try:
        async with loaded_engine(plan, forced) as engine:
            prompts = rig.prompts() if rig else TokenPrompts(_FIRST_TOKEN, engine.client.info.vocab_size)
            digests = [adapter.digest for adapter in engine.store.adapters]
            target = EngineTarget(engine.client, prompts, digests)

            async def run(point: LoadPlan) -> LoadOutcome:
                if point.num_requests is not None:
                    prompts.prepare(point.requests())
                outcome = await run_load(target, point)
                keeper.keep(outcome)
                return outcome

            expectation = Expectation(digests, forced if rig else None)
            points = await run_points(sweep.plans(), sweep.repeats, expectation, run, on_point)
            facts = await server_facts(plan, engine)
        if probe_steps:
            routing = await probe_routing(plan, sweep.plans(), keeper, probe_steps, forced)
            points = tuple(
                replace(point, routing=found) for point, found in zip(points, routing, strict=True)
            )
    except EngineDeadError as error:
        raise LoadError(error.message) from error
    return facts, points


async def server_facts(plan: EnginePlan, engine: LoadedEngine) -> ServerFacts:
    """What was measured, as of now."""
    info, status = engine.client.info, await engine.client.status()
    return ServerFacts(
        model=info.model_name,
        dtype=info.dtype,
        device=gpu_name() if runs_on_gpu(plan) else "cpu",
        slots=plan.slots,
        startup_s=engine.startup_s,
        adapter_bytes=status.arena_used_bytes // max(1, plan.slots),
        adapter_load_s=engine.adapter_load_s,
        compilations=status.compilations,
        preemptions=status.preemptions,
        settings=settings_facts(plan),
        startup_phases=dict(info.start_phases),
    )
