"""A whole bench over gRPC, on a node that serves already."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lorikeet_bench.load.driver import LoadOutcome, run_load
from lorikeet_bench.load.judge import Expectation
from lorikeet_bench.load.lengths import LoadError
from lorikeet_bench.load.metrics import LoadSummary
from lorikeet_bench.load.plan import LoadPlan
from lorikeet_bench.load.prompts import TextPrompts, TokenPrompts
from lorikeet_bench.load.result import PointResult
from lorikeet_bench.load.rig_tokens import RigTokens
from lorikeet_bench.load.samples import SampleKeeper
from lorikeet_bench.load.sweep import Sweep, run_points
from lorikeet_bench.serve.target import GrpcTarget, NodeAddress
from lorikeet_client import AsyncLorikeet, Model

_SAMPLE_WORDS = 256


@dataclass(frozen=True, slots=True)
class ServedAdapters:
    """What the requests name, counted as the plan does. `digests` empty: who answers is not judged.

    `rig` are the tokens of an exact rig, where the node serves one.
    """

    names: Sequence[str] = ()
    digests: Sequence[str] = ()
    rig: RigTokens | None = None


@dataclass(frozen=True, slots=True)
class ServeOutcome:
    """The points, their requests, and the node as it was before and after them."""

    points: tuple[PointResult, ...]
    before: Model
    after: Model
    samples: SampleKeeper


async def run_serve_bench(
    node: NodeAddress,
    sweep: Sweep,
    adapters: ServedAdapters,
    *,
    with_text: bool = False,
    on_point: Callable[[str, LoadSummary], None] = lambda _name, _summary: None,
) -> ServeOutcome:
    """Measure every point of `sweep`.

    Args:
        node: where to, and as whom.
        sweep: the points; each asks for at most as many adapters as there are.
        adapters: what is asked for.
        with_text: prompts are text, as long as the node's tokenizer makes them.
        on_point: called after each run of a point.

    Raises:
        LoadError: a load that this node cannot take.
        CallError: the node does not answer.
    """
    keeper = SampleKeeper()
    async with AsyncLorikeet(node.inference, token=node.token, tls=node.tls) as client:
        before = await client.get_model()
        _check(sweep, adapters, before)
        if with_text and adapters.rig is None:
            prompts = TextPrompts()
            sample = await client.tokenize(prompts.sample(_SAMPLE_WORDS))
            prompts.words_per_token = _SAMPLE_WORDS / len(sample.ids)
        else:
            prompts = adapters.rig.prompts() if adapters.rig else TokenPrompts(1, before.vocab_size)
        async with GrpcTarget(node, prompts, adapters.names) as target:

            async def run(point: LoadPlan) -> LoadOutcome:
                if point.num_requests is not None and isinstance(prompts, TokenPrompts):
                    prompts.prepare(point.requests())
                outcome = await run_load(target, point)
                keeper.keep(outcome)
                return outcome

            expectation = Expectation(adapters.digests, adapters.rig.forced if adapters.rig else None)
            points = await run_points(sweep.plans(), sweep.repeats, expectation, run, on_point)
        return ServeOutcome(points, before, await client.get_model(), keeper)


def _check(sweep: Sweep, adapters: ServedAdapters, model: Model) -> None:
    if max(sweep.adapters) > len(adapters.names):
        raise LoadError(f"{max(sweep.adapters)} adapters are asked for, {len(adapters.names)} are there")
    if (longest := sweep.template.longest) > (limit := model.limits.max_context_tokens):
        raise LoadError(
            f"the longest request has {longest} tokens, the node takes {limit}: lower --input-tokens "
            "or --output-tokens, or the lengths in the file of --lengths"
        )
