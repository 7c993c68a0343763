"""LoRA beside the base's ops changes when things run, not what they make; here on a CPU, one by one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inference_service.execution.backend import DeviceBackend
from inference_service.layers.batch import LoraBatch
from inference_service.layers.linear import Linear, LinearSites
from inference_service.layers.projected import Projected
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.side_stream import SideStream
from lorikeet_kernels.testing import SiteShape, SlotSite, make_tables
from lorikeet_kernels.tiling.lora_overlap import FASTER_BESIDE, BesideRows, runs_beside
from tests.support.golden import GOLDEN_MODELS, GoldenModel, prompts
from tests.support.random_adapters import activate_random
from tests.support.runner import GREEDY, Driven, DrivenRequest, drive, make_backend

CPU = torch.device("cpu")


class Counter:
    """Counts what runs beside."""

    def __init__(self) -> None:
        self.count = 0

    def beside(self, base: Callable[[], object], branch: Callable[[], None]) -> object:
        """As SideStream's without a stream, the branch first: neither may need the other."""
        self.count += 1
        branch()
        return base()


def answers(backend: DeviceBackend, model: GoldenModel, scratch: Path) -> list[Driven]:
    """Prompts of two adapters and of the base in one batch that has a fixed shape once all decode."""
    for slot in (0, 1):
        activate_random(backend, scratch.with_suffix(f".{slot}"), slot, rank=3 + 5 * slot)
    sampling = replace(GREEDY, logprobs=model.vocab_size)
    short = [ids[:33] for ids in prompts().values()]
    batch = [DrivenRequest(ids, slot, sampling) for slot in (0, -1, 1) for ids in short]
    return drive(backend, batch, num_tokens=5)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [(m, "float32") for m in GOLDEN_MODELS] + [(m, "bfloat16") for m in GOLDEN_MODELS if m.is_always],
    ids=lambda value: value.name if isinstance(value, GoldenModel) else value,
)
def test_every_family_keeps_its_bits(
    model: GoldenModel, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention, dense and expert MLPs, shared experts, routers, factors: every reader of a delta adds it."""
    counter = Counter()
    monkeypatch.setattr(SideStream, "beside", lambda _, base, branch: counter.beside(base, branch))
    found = []
    for wanted in (False, True):
        assert counter.count == 0
        backend = make_backend(model.name, dtype=dtype, graph_batch_sizes=(15,), lora_overlap=wanted)
        found.append(answers(backend, model, tmp_path / str(wanted)))
    assert counter.count
    assert found[0] == found[1]


def test_a_row_without_an_adapter_keeps_the_sign_of_a_zero() -> None:
    """Its delta is a negative zero, the one number whose addition changes no bit."""
    tables = make_tables([SiteShape(8, 6)], [[SlotSite(4)], [SlotSite(0)]], dtype=torch.bfloat16)
    segments = make_lora_segments(torch.tensor([0, -1, 1], dtype=torch.int32), 2)
    linear = Linear(
        torch.zeros(6, 8).bfloat16(), torch.full((6,), -0.0).bfloat16(), LinearSites((0,), (6,), (1,))
    )
    x = torch.full((3, 8), -1.0).bfloat16()
    side = SideStream.on(CPU, BesideRows())
    apart = linear.beside(x, LoraBatch(segments, tables, is_active=True, side=side))
    assert apart.delta is not None
    assert apart.delta[1:].signbit().all()
    apart.y.fill_(-0.0)
    before = apart.y.clone().view(torch.int16)
    assert torch.equal(apart.whole()[1:].view(torch.int16), before[1:])
    assert not torch.equal(apart.y[0].view(torch.int16), before[0])


def test_a_batch_is_large_enough_or_not() -> None:
    """The first of a range is in it; a part with an empty one never runs beside."""
    tables = make_tables([SiteShape(8, 6)], [[SlotSite(4)]], dtype=torch.float32)
    linear = Linear(torch.randn(6, 8), None, LinearSites((0,), (6,), (1,)))
    for rows, expected in (
        (BesideRows(dense=range(3, 5)), True),
        (BesideRows(dense=range(4, 9)), False),
        (BesideRows(range(0)), False),
    ):
        segments = make_lora_segments(torch.zeros(3, dtype=torch.int32), 1)
        lora = LoraBatch(segments, tables, is_active=True, side=SideStream.on(CPU, rows))
        x = torch.randn(3, 8)
        apart = linear.beside(x, lora)
        assert (apart.delta is not None) == expected
        assert torch.equal(apart.whole(), linear(x, lora))
        assert linear.beside(x, replace(lora, is_active=False)).delta is None


def test_one_launch_makes_both_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot, as on a CPU, the delta is made beside, or in place."""
    tables = make_tables([SiteShape(8, 6)], [[SlotSite(4)]], dtype=torch.float32)
    linear = Linear(torch.randn(6, 8), None, LinearSites((0,), (6,), (1,)))
    segments = make_lora_segments(torch.zeros(3, dtype=torch.int32), 1)
    x = torch.randn(3, 8)

    def apart(joined: range, dense: range) -> Projected:
        side = SideStream.on(CPU, BesideRows(dense=dense, joined=joined))
        return linear.beside(x, LoraBatch(segments, tables, is_active=True, side=side))

    assert not apart(range(1, 5), range(1, 5)).is_joined
    assert apart(range(1, 5), range(1, 5)).delta is not None
    assert apart(range(1, 5), range(0)).delta is None
    made = torch.zeros(3, 6), torch.ones(3, 6)
    monkeypatch.setattr("inference_service.layers.linear.joined_linear", lambda *_: made)
    both = apart(range(1, 5), range(1, 5))
    assert both.is_joined
    assert (both.y, both.delta) == made
    assert not apart(range(4, 5), range(1, 5)).is_joined
    linear.batch_invariant = True
    assert not apart(range(1, 5), range(1, 5)).is_joined


def test_rows_without_a_delta_are_whole() -> None:
    """Nothing is added, nothing copied."""
    y = torch.randn(2, 3)
    assert Projected(y).whole() is y


def test_what_runs_beside_by_default() -> None:
    """What was measured on a device, nothing on others; where it was asked for the best that is known."""
    assert runs_beside("NVIDIA H200", None) == FASTER_BESIDE["NVIDIA H200"]
    assert runs_beside("cpu", None) is None
    assert runs_beside("cpu", wanted=True) == BesideRows()
    assert runs_beside("NVIDIA H200", wanted=False) is None
