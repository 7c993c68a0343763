"""Captured decode steps on a GPU: what they bring and leave alone, and what never waits or compiles."""

import dataclasses
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

from inference_service.domain.step import NewRequest, ScheduledRequest, SchedulerOutput
from inference_service.execution.backend import DeviceBackend
from tests.support.device_waits import no_waiting
from tests.support.golden import GOLDEN_MODELS, GoldenModel, prompts
from tests.support.ingested import activate
from tests.support.random_adapters import activate_random
from tests.support.runner import GREEDY, DrivenRequest, drive, make_backend
from tests.support.tiny_model import CONFIG, write_model
from tests.support.workload import random_arrivals, run_workload

NUM_BLOCKS = 40
SCHEDULER = {"block_tokens": 8, "num_blocks": NUM_BLOCKS, "max_step_tokens": 48, "max_running_requests": 7}
MOES = [model for model in GOLDEN_MODELS if model.name in ("qwen3_moe", "gpt_oss", "gpt_oss_mxfp4")]


def make(path: Path, device: str = "cuda", **settings: object) -> DeviceBackend:
    """A small backend of the tiny model with two adapters."""
    defaults: dict[str, object] = {
        "block_tokens": 8, "num_blocks": NUM_BLOCKS, "max_context_tokens": 100, "max_running_requests": 7,
        "max_step_tokens": 48,
    }  # fmt: skip
    backend = make_backend(model_dir=str(path), device=device, **(defaults | settings))
    for slot in (0, 1):
        activate_random(backend, path.parent / f"adapter{slot}-{device}", slot, rank=4 + 5 * slot)
    return backend


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny model for all; its dimensions are those that the kernels take."""
    return write_model(
        tmp_path_factory.mktemp("model"), hidden_size=64, moe_intermediate_size=32, head_dim=16
    )


def test_graphs_and_overlap_bring_the_same_tokens(model: Path) -> None:
    """A random workload in float32: as on a CPU without either. A rounding may part few requests.

    Nothing is compiled or captured meanwhile, and every block comes back.
    """
    ways = {
        "cpu": (make(model, "cpu"), False),
        "graphs": (make(model), True),
        "no graphs": (make(model, cuda_graphs=False), True),
    }
    assert len(ways["graphs"][0].runner._graphs) == 2 * len(ways["graphs"][0].runner._builder.shapes.all())
    assert len(ways["no graphs"][0].runner._graphs) == 0
    arrivals = random_arrivals(random.Random(5), 60, vocab_size=CONFIG["vocab_size"], num_slots=2)
    found = {}
    for name, (backend, overlaps) in ways.items():
        found[name], scheduler = run_workload(backend.runner, arrivals, overlaps=overlaps, **SCHEDULER)
        assert scheduler.stats().blocks_available == NUM_BLOCKS
        assert backend.compilations() == 0, name
    for name in ("graphs", "no graphs"):
        parted = 0
        for request_id, expected in found["cpu"].items():
            both = min(len(expected.token_ids), len(found[name][request_id].token_ids))
            parted += found[name][request_id].token_ids[:both] != expected.token_ids[:both]
        assert parted <= 3, (name, parted)


def test_a_launch_waits_for_nothing(model: Path) -> None:
    """Neither a step with a prompt in it nor a decode, with adapters and log-probabilities."""
    backend = make(model)
    runner = backend.runner
    sampling = dataclasses.replace(
        GREEDY, temperature=0.8, top_p=0.9, top_k=9, logprobs=2, prompt_logprobs=1, presence_penalty=0.5,
        min_tokens=2, held_back_token_ids=(2,), logit_bias=((3, 1.0),),
    )  # fmt: skip

    def steps(launching: Callable[[], AbstractContextManager[None]]) -> None:
        new = [
            NewRequest(f"r{n}", tuple(range(9 + n)), 9 + n, sampling, (4 * n, 4 * n + 1, 4 * n + 2), 0, n - 1)
            for n in range(3)
        ]
        first = tuple(ScheduledRequest(r.request_id, 0, r.num_prompt_tokens) for r in new)
        with launching():
            runner.launch(SchedulerOutput(0, first, tuple(new)))
        for step in range(1, 4):
            shares = tuple(ScheduledRequest(r.request_id, r.num_prompt_tokens + step - 1, 1) for r in new)
            with launching():
                runner.launch(SchedulerOutput(step, shares))
            runner.collect()
        runner.collect()
        runner.execute(SchedulerOutput(9, (), finished=tuple(r.request_id for r in new)))

    steps(nullcontext)  # makes the counts and the pinned memory that later ones take
    steps(no_waiting)


@pytest.mark.parametrize("sizes", [None, (3, 7)])
def test_a_replay_reads_its_own_step(model: Path, sizes: tuple[int, ...] | None) -> None:
    """Batches of 1 to 7 requests in any order of sizes, across blocks: as each request alone."""
    backend = make(model, graph_batch_sizes=sizes, batch_invariant=True, block_tokens=16, max_step_tokens=300)
    generator = random.Random(3)
    every = [
        DrivenRequest([generator.randrange(40) for _ in range(generator.randrange(1, 40))], n % 3 - 1)
        for n in range(7)
    ]
    alone = [drive(backend, [request], num_tokens=20)[0].token_ids for request in every]
    for count in (7, 1, 4, 2, 7, 3, 5, 6):
        together = drive(backend, every[:count], num_tokens=20)
        wrong = [n for n, (a, b) in enumerate(zip(together, alone, strict=False)) if a.token_ids != b]
        assert len(wrong) <= 1, (count, wrong)
    assert backend.compilations() == 0


@pytest.mark.parametrize("model", MOES, ids=lambda model: model.name)
def test_base_rows_keep_their_bits(model: GoldenModel, tmp_path: Path) -> None:
    """In bfloat16, over graphs: base requests beside adapters, and on a server that has none.

    The batches have the same shape; only a router's own adapter moves its row to other experts, whose base
    rows then share their blocks with other rows.
    """

    def requests(slot: int) -> list[DrivenRequest]:
        sampling = dataclasses.replace(GREEDY, logprobs=model.vocab_size)
        return [DrivenRequest(ids, slot, sampling) for ids in prompts().values()]

    with_adapters = make_backend(model.name, device="cuda", dtype="bfloat16")
    without = make_backend(model.name, device="cuda", dtype="bfloat16")
    for slot, name in enumerate(model.mixed[:2]):
        activate(with_adapters, f"{model.golden}/{name}", slot, tmp_path)
    beside = drive(with_adapters, requests(-1) + requests(0) + requests(1), chunk=40)
    alone = drive(without, requests(-1) + requests(-1) + requests(-1), chunk=40)
    assert beside[4].logprobs != alone[4].logprobs
    assert beside[:4] == alone[:4]
    assert drive(with_adapters, requests(-1)) == drive(without, requests(-1))


@pytest.mark.parametrize("model", MOES, ids=lambda model: model.name)
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_lora_beside_the_base_keeps_its_bits(model: GoldenModel, cuda_graphs: bool, tmp_path: Path) -> None:
    """The second stream changes when things run, not what they make."""
    sampling = dataclasses.replace(GREEDY, logprobs=model.vocab_size)
    found = []
    for lora_overlap in (False, True):
        backend = make_backend(
            model.name, device="cuda", dtype="bfloat16", lora_overlap=lora_overlap, cuda_graphs=cuda_graphs
        )
        for slot, name in enumerate(model.mixed[:3]):
            activate(backend, f"{model.golden}/{name}", slot, tmp_path)
        batch = [DrivenRequest(ids, slot, sampling) for slot in range(-1, 3) for ids in prompts().values()]
        found.append([drive(backend, batch, num_tokens=40) for _ in range(2)])
    assert found[0] == found[1]


def test_graphs_share_their_memory(model: Path) -> None:
    """All of them together take little more than the largest; each keeps its result alone."""
    torch.cuda.empty_cache()
    one = make(model, graph_batch_sizes=(7,))
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    many = make(model, graph_batch_sizes=(1, 2, 3, 4, 5, 6, 7))
    torch.cuda.synchronize()
    for backend in (one, many):
        assert len(backend.runner._graphs) == 2 * len(backend.runner._builder.shapes.all())
    # decodes of six more sizes, with adapters and without; steps with prompts have the same shapes in both
    assert len(many.runner._graphs) - len(one.runner._graphs) == 2 * 6
    assert torch.cuda.memory_reserved() - before < 256 << 20
