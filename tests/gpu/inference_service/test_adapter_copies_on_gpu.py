"""Adapters on their way to a GPU and within its arena: no byte is lost, whatever runs at the same time."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from inference_service.execution import device_arena
from inference_service.execution.adapter_layout import AdapterPlacer
from inference_service.execution.device_arena import TensorArena
from inference_service.execution.host_memory import RangeMemory, pinned_memory
from inference_service.execution.host_pool import HostAdapter, PinnedHostPool
from inference_service.models import describe_model
from inference_service.models.lora_sites import lora_schema
from lorikeet_contract.manifest import Manifest
from lorikeet_contract.schema import LoraSchema
from tests.support.payloads import random_site, write_payload
from tests.support.tiny_model import write_model

SLEEP_CYCLES = 200_000_000  # some 0.1 s on the device


class Room:
    """A pool in pinned memory and an arena on the GPU, for adapters of the tiny model."""

    def __init__(self, path: Path, num_units: int) -> None:
        self.path = path
        spec = describe_model(write_model(path / "model", {}, hidden_size=512)).spec
        self.schema: LoraSchema = lora_schema(spec, lambda _name: ("", ""))
        self.placer = AdapterPlacer(self.schema, "base", 4, 64)
        self.manifests: dict[int, Manifest] = {}
        self.unit = self.placer.place(self.write(0, 8)).num_bytes
        total = num_units * self.unit
        self.pool = PinnedHostPool(
            self.placer, torch.float32, 2 * total, ThreadPoolExecutor(2), pinned_memory(2 * total)
        )
        self.arena = TensorArena(
            self.pool, self.placer.indices, num_slots=8, max_rank=64, total_bytes=total, dtype=torch.float32,
            device=torch.device("cuda"),
        )  # fmt: skip

    def write(self, index: int, rank: int) -> Manifest:
        """Weights at all sites of the layers, each index's its own."""
        sites = [
            random_site(s, rank, seed=100 * index + i)
            for i, s in enumerate(self.schema.sites)
            if s.layer is not None
        ]
        self.manifests[index] = write_payload(self.path / str(index), self.schema, "base", sites)
        return self.manifests[index]

    def begin(self, index: int, rank: int = 8) -> None:
        """Into the slot of the same number."""
        manifest = self.write(index, rank)
        self.pool.read(manifest, str(self.path / str(index)))
        assert self.arena.begin_copy(manifest.digest, index)

    def finish(self) -> None:
        """Until no copy is under way."""
        torch.cuda.synchronize()
        self.arena.poll()

    def check(self, index: int) -> None:
        """What the tables point at is what was written."""
        adapter = self.pool.get(self.manifests[index].digest)
        assert isinstance(adapter, HostAdapter)
        tables = self.arena.tables.copy_to_host()
        bits = self.arena._bytes.cpu()
        for layer, data in zip(adapter.layout.layers, adapter.layers, strict=True):
            for site in layer.sites:
                column = self.placer.indices[layer.payload.layer, site.key]
                for where, offsets in ((site.a, tables.a_offset), (site.b, tables.b_offset)):
                    size = 4 * torch.Size(where.shape).numel()
                    begin = 4 * int(offsets[index, column])
                    stored = data[where.offset - layer.begin :][:size]
                    assert torch.equal(bits[begin : begin + size], stored)
                assert tables.rank[index, column] == site.rank


@pytest.mark.parametrize("piece_bytes", [device_arena._MOVE_BYTES, 64 << 10])
def test_compaction_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    """Adapters move over themselves while earlier steps read the old places and a copy is under way."""
    monkeypatch.setattr(device_arena, "_MOVE_BYTES", piece_bytes)
    room = Room(tmp_path, 8)
    for index, rank in ((0, 8), (1, 24), (2, 8), (3, 16)):
        room.begin(index, rank)
    room.finish()
    room.arena.release(0)
    room.arena.release(2)
    torch.cuda._sleep(SLEEP_CYCLES)
    before = room.arena._bytes.clone()  # a step that was enqueued before reads this
    assert room.arena.compact()
    room.begin(4, 16)  # two units: into the gap that the moves made
    room.finish()
    for index in (1, 3, 4):
        room.check(index)
    room.arena.release(1)
    torch.cuda._sleep(SLEEP_CYCLES)
    room.begin(5)  # waits behind the sleep: it is under way while the others move
    assert room.arena.compact()
    room.finish()
    for index in (3, 4, 5):
        room.check(index)
    assert before.any()


def test_a_cancelled_copy_keeps_its_bytes_until_it_ended(tmp_path: Path) -> None:
    """The pool does not hand out what the device still reads, nor does the next adapter get its bytes."""
    room = Room(tmp_path, 1)
    torch.cuda._sleep(SLEEP_CYCLES)
    room.begin(0)
    digest = room.manifests[0].digest
    room.arena.release(0)
    room.pool.drop(digest)
    memory = room.pool._memory
    assert isinstance(memory, RangeMemory)
    first = memory.take([room.unit])
    assert first is not None
    assert memory.take([room.unit]) is None  # the copy holds it
    memory.give_back(first)
    room.begin(1)  # the same bytes of the arena, behind the cancelled copy
    room.finish()
    room.check(1)
    room.arena.poll()
    assert memory.take([room.unit]) is not None


def test_the_whole_pool_is_page_locked() -> None:
    """Every range of it, and a copy from it does not hold up the host."""
    memory = pinned_memory(64 << 20)
    ranges = memory.take([16 << 20] * 4)
    assert ranges is not None
    target = torch.empty(16 << 20, dtype=torch.uint8, device="cuda")
    for part in ranges:
        assert part.is_pinned()
        torch.cuda._sleep(SLEEP_CYCLES)
        part.fill_(7)
        target.copy_(part, non_blocking=True)
        assert not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        assert bool((target == 7).all())
