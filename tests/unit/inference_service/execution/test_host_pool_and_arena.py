"""Host pool and arena: what is refused, what is counted, what is copied when."""

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from inference_service.domain.errors import AdapterTooLargeError, CapacityError, PayloadError
from inference_service.execution import device_arena
from inference_service.execution.adapter_layout import AdapterPlacer
from inference_service.execution.arena_copy import CpuCopy
from inference_service.execution.device_arena import TensorArena
from inference_service.execution.host_memory import HostMemory, PageableMemory, RangeMemory
from inference_service.execution.host_pool import PinnedHostPool
from inference_service.models import describe_model
from inference_service.models.lora_sites import lora_schema
from lorikeet_contract.manifest import Manifest, PayloadDtype
from lorikeet_contract.schema import LoraSchema
from tests.support.payloads import SiteWeights, random_site, write_payload
from tests.support.tiny_model import write_model


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> LoraSchema:
    """The tiny model's sites."""
    path = write_model(tmp_path_factory.mktemp("model"), {})
    return lora_schema(describe_model(path).spec, lambda _name: ("", ""))


def make_pool(
    schema: LoraSchema,
    total_bytes: int = 1 << 20,
    dtype: torch.dtype = torch.float32,
    max_rank: int = 16,
    memory: HostMemory | None = None,
) -> PinnedHostPool:
    """A pool of the base model named "base"."""
    placer = AdapterPlacer(schema, "base", dtype.itemsize, max_rank)
    return PinnedHostPool(placer, dtype, total_bytes, ThreadPoolExecutor(2), memory or PageableMemory())


def make_arena(
    schema: LoraSchema, pool: PinnedHostPool, total_bytes: int = 1 << 20, num_slots: int = 3
) -> TensorArena:
    """An arena, of three slots unless said otherwise."""
    placer = AdapterPlacer(schema, "base", 4, 16)
    return TensorArena(
        pool,
        placer.indices,
        num_slots=num_slots,
        max_rank=16,
        total_bytes=total_bytes,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def make_sites(schema: LoraSchema, rank: int = 4, seed: int = 0, keys: str = "qo") -> list[SiteWeights]:
    """Weights at all sites of the given keys."""
    return [random_site(site, rank, seed=seed + i) for i, site in enumerate(schema.sites) if site.key in keys]


def write(path: Path, schema: LoraSchema, sites: list[SiteWeights], **options: PayloadDtype) -> Manifest:
    """A payload for the base model named "base"."""
    return write_payload(path, schema, "base", sites, **options)


def test_read_is_counted_once_and_dropped(tmp_path: Path, schema: LoraSchema) -> None:
    """Reading again costs nothing; dropping gives the bytes back; unknown digests are fine."""
    pool = make_pool(schema)
    manifest = write(tmp_path / "p", schema, make_sites(schema))
    assert pool.read(manifest, str(tmp_path / "p")) == pool.bytes_needed(manifest) == pool.used_bytes
    pool.read(manifest, str(tmp_path / "gone"))
    assert pool.used_bytes == pool.bytes_needed(manifest)
    pool.drop(manifest.digest)
    pool.drop("unknown")
    assert pool.used_bytes == 0
    assert pool.get(manifest.digest) is None


def test_concurrent_reads_share_one(tmp_path: Path, schema: LoraSchema) -> None:
    """Many threads asking for one revision take its bytes once."""
    pool = make_pool(schema)
    manifest = write(tmp_path / "p", schema, make_sites(schema))
    threads = [threading.Thread(target=pool.read, args=(manifest, str(tmp_path / "p"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.used_bytes == pool.bytes_needed(manifest)


def flip(data: bytearray) -> None:
    """One bit of the last layer."""
    data[-700] ^= 1


def cut(data: bytearray) -> None:
    """The last byte."""
    del data[-1:]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, "damaged: the sha256 of layer 1"),
        (cut, "cut short: layer 1 needs"),
        (bytearray.clear, "cut short"),
    ],
)
def test_damaged_payload(
    tmp_path: Path, schema: LoraSchema, damage: Callable[[bytearray], None], message: str
) -> None:
    """A flipped bit, a lost byte, an empty file: refused with the layer's name, and nothing is kept."""
    pool = make_pool(schema)
    manifest = write(tmp_path / "p", schema, make_sites(schema))
    data = bytearray((tmp_path / "p").read_bytes())
    damage(data)
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(PayloadError, match=message):
        pool.read(manifest, str(tmp_path / "p"))
    assert pool.used_bytes == 0
    with pytest.raises(PayloadError, match="its payload cannot be read: No such file"):
        pool.read(manifest, str(tmp_path / "gone"))


def test_no_room(tmp_path: Path, schema: LoraSchema) -> None:
    """CapacityError, nothing kept; after a drop it fits."""
    first = write(tmp_path / "a", schema, make_sites(schema))
    second = write(tmp_path / "b", schema, make_sites(schema, seed=50))
    pool = make_pool(schema, total_bytes=make_pool(schema).bytes_needed(first) + 100)
    pool.read(first, str(tmp_path / "a"))
    with pytest.raises(CapacityError, match="100 of"):
        pool.read(second, str(tmp_path / "b"))
    pool.drop(first.digest)
    pool.read(second, str(tmp_path / "b"))


def test_wrong_model_and_rank(tmp_path: Path, schema: LoraSchema) -> None:
    """Another base, another schema, a rank beyond the limit, a site that is not there."""
    manifest = write(tmp_path / "p", schema, make_sites(schema))
    pool = make_pool(schema)
    with pytest.raises(PayloadError, match="was made for base model other, this node serves base"):
        pool.read(replace(manifest, base_digest="other"), str(tmp_path / "p"))
    with pytest.raises(PayloadError, match="LoRA schema"):
        pool.bytes_needed(replace(manifest, schema_digest="other"))
    with pytest.raises(AdapterTooLargeError, match=r"rank 4, this node serves ranks up to 2 \(--max-rank\)"):
        make_pool(schema, max_rank=2).read(manifest, str(tmp_path / "p"))
    layer = manifest.layers[0]
    for change, message in (
        ({"key": "mlp_down"}, "site 'layers.0.mlp_down', which this model does not have"),
        ({"rank": 9}, "of rank 9 has A"),
        ({"scales": (1.0, 2.0, 3.0)}, "has 3 scales"),
        ({"b": replace(layer.sites[0].b, offset=1 << 20)}, "outside its layer's bytes"),
    ):
        bad = replace(layer, sites=(replace(layer.sites[0], **change), *layer.sites[1:]))
        with pytest.raises(PayloadError, match=message):
            pool.bytes_needed(replace(manifest, layers=(bad, *manifest.layers[1:])))


def test_values_that_do_not_fit(tmp_path: Path, schema: LoraSchema) -> None:
    """Overflow of the compute dtype, after scaling, names the site; so do NaN and infinity."""
    site = schema.sites[0]
    for scales, value, dtype, message in (
        ((1e30,), 1e10, torch.float32, "layers.0.q: B times its scaling overflows float32"),
        ((1.0,), 1e5, torch.float16, "layers.0.q: B times its scaling overflows float16"),
        ((1.0,), float("nan"), torch.float32, "layers.0.q: B holds NaN or infinity"),
    ):
        weights = random_site(site, 4, scales=scales)
        weights.b[0, 0] = value
        manifest = write(tmp_path / "p", schema, [weights])
        pool = make_pool(schema, dtype=dtype)
        with pytest.raises(PayloadError, match=message):
            pool.read(manifest, str(tmp_path / "p"))
        assert pool.used_bytes == 0


def test_rounds_once(tmp_path: Path, schema: LoraSchema) -> None:
    """B is scaled in float32 and rounded to the compute dtype in one step; A is only rounded."""
    weights = random_site(schema.sites[0], 8, scales=(0.3,))
    manifest = write(tmp_path / "p", schema, [weights])
    pool = make_pool(schema, dtype=torch.bfloat16)
    pool.read(manifest, str(tmp_path / "p"))
    adapter = pool.get(manifest.digest)
    assert adapter is not None
    placed = adapter.layout.layers[0].sites[0]
    for tensor, expected in (
        (placed.a, torch.from_numpy(weights.a)),
        (placed.b, torch.from_numpy(weights.b) * torch.tensor(0.3)),
    ):
        stored = adapter.layers[0][tensor.offset : tensor.offset + 2 * expected.numel()].view(torch.bfloat16)
        assert torch.equal(stored.view(expected.shape), expected.to(torch.bfloat16))


def test_tables_change_when_the_copy_ended(tmp_path: Path, schema: LoraSchema) -> None:
    """Ranks stay 0 until poll reports the slot; release sets them back; offsets point at the weights."""
    pool = make_pool(schema)
    arena = make_arena(schema, pool)
    sites = make_sites(schema)
    manifest = write(tmp_path / "p", schema, sites)
    pool.read(manifest, str(tmp_path / "p"))
    assert arena.begin_copy(manifest.digest, 1)
    assert not arena.tables.rank.any()
    assert list(arena.poll()) == [1]
    assert list(arena.poll()) == []
    assert arena.used_bytes == pool.bytes_needed(manifest)
    names = [site.name for site in schema.sites]
    for weights in sites:
        column = names.index(weights.site.name)
        assert int(arena.tables.rank[1, column]) == 8
        assert int(arena.tables.num_a[1, column]) == 1
        start = int(arena.tables.a_offset[1, column])
        stored = arena.tables.arena[start : start + weights.a.size].numpy()
        np.testing.assert_array_equal(stored.reshape(weights.a.shape), weights.a)
    assert int((arena.tables.rank > 0).sum()) == len(sites)
    arena.release(1)
    arena.release(1)
    assert not arena.tables.rank.any()
    assert arena.used_bytes == 0


def test_copies_take_turns_with_steps(
    tmp_path: Path, schema: LoraSchema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer a call where the budget is small; a release in between cancels."""
    monkeypatch.setattr(CpuCopy, "BYTES_PER_CALL", 1)
    pool = make_pool(schema)
    arena = make_arena(schema, pool)
    manifest = write(tmp_path / "p", schema, make_sites(schema))
    pool.read(manifest, str(tmp_path / "p"))
    arena.begin_copy(manifest.digest, 0)
    pool.drop(manifest.digest)  # the copy holds what it reads
    assert list(arena.poll()) == []
    assert list(arena.poll()) == [0]
    arena.release(0)
    pool.read(manifest, str(tmp_path / "p"))
    arena.begin_copy(manifest.digest, 2)
    assert list(arena.poll()) == []
    arena.release(2)
    assert list(arena.poll()) == []
    assert arena.used_bytes == 0


def test_no_gap(tmp_path: Path, schema: LoraSchema) -> None:
    """False without room, and where free bytes are in pieces; an unknown revision is an error."""
    pool = make_pool(schema)
    manifests = [write(tmp_path / f"{i}", schema, make_sites(schema, seed=9 * i)) for i in range(3)]
    for index, manifest in enumerate(manifests):
        pool.read(manifest, str(tmp_path / f"{index}"))
    size = pool.bytes_needed(manifests[0])
    arena = make_arena(schema, pool, total_bytes=2 * size)
    assert arena.begin_copy(manifests[0].digest, 0)
    assert arena.begin_copy(manifests[1].digest, 1)
    assert not arena.begin_copy(manifests[2].digest, 2)
    arena.release(0)
    assert arena.begin_copy(manifests[2].digest, 2)
    with pytest.raises(PayloadError, match="not in the host pool"):
        arena.begin_copy("unknown", 0)


def stored_b(arena: TensorArena, schema: LoraSchema, slot: int, weights: SiteWeights) -> np.ndarray:
    """What the tables say that one site's B is."""
    column = [site.name for site in schema.sites].index(weights.site.name)
    begin, rank = int(arena.tables.b_offset[slot, column]), int(arena.tables.rank[slot, column])
    rows, used = weights.b.shape
    return arena.tables.arena[begin : begin + rows * rank].numpy().reshape(rows, rank)[:, :used]


@pytest.mark.parametrize("piece_bytes", [device_arena._MOVE_BYTES, 768])
def test_compacting_makes_one_gap_of_many(
    tmp_path: Path, schema: LoraSchema, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    """Small and large ones move over themselves, a copy in progress stays, and tables follow the weights."""
    monkeypatch.setattr(device_arena, "_MOVE_BYTES", piece_bytes)
    monkeypatch.setattr(CpuCopy, "BYTES_PER_CALL", 1)
    pool = make_pool(schema)
    sites = [make_sites(schema, rank=rank, seed=9 * i) for i, rank in enumerate((8, 16, 8, 8, 8, 16))]
    manifests = [write(tmp_path / f"{i}", schema, s) for i, s in enumerate(sites)]
    for index, manifest in enumerate(manifests):
        pool.read(manifest, str(tmp_path / f"{index}"))
    unit, double = (pool.bytes_needed(manifests[index]) for index in (0, 1))
    arena = make_arena(schema, pool, total_bytes=5 * unit + double, num_slots=6)
    assert not arena.compact()

    def place(index: int, slot: int, polls: int = 2) -> None:
        assert arena.begin_copy(manifests[index].digest, slot)
        for _ in range(polls):
            arena.poll()

    for index in (0, 1, 2, 3):
        place(index, index)
    place(4, 4, polls=1)  # still copying
    arena.release(0)
    arena.release(2)
    used = arena.used_bytes
    assert used == double + 2 * unit
    assert not arena.begin_copy(manifests[5].digest, 5)
    assert arena.compact()
    assert not arena.compact()
    assert arena.used_bytes == used
    arena.poll()
    place(5, 5)
    assert arena.used_bytes == 2 * double + 2 * unit
    for index in (1, 3, 4, 5):
        for weights in sites[index]:
            np.testing.assert_array_equal(stored_b(arena, schema, index, weights), weights.b)
    for slot in range(6):
        arena.release(slot)
    assert arena.used_bytes == 0


def test_an_empty_revision_is_active_at_once(schema: LoraSchema) -> None:
    """No sites, no bytes: it behaves as the base."""
    manifest = Manifest("base", schema.digest, PayloadDtype.FLOAT32, 0, ())
    assert hashlib.sha256(manifest.to_json()).hexdigest() == manifest.digest
    pool = make_pool(schema)
    arena = make_arena(schema, pool, total_bytes=0)
    assert pool.read(manifest, "nowhere") == 0
    assert arena.begin_copy(manifest.digest, 0)
    assert list(arena.poll()) == [0]


def test_pinned_ranges_come_back_when_nobody_reads_them(tmp_path: Path, schema: LoraSchema) -> None:
    """Not before: a copy in progress still reads what was dropped. A failed read holds nothing."""
    manifests = [write(tmp_path / f"{i}", schema, make_sites(schema, seed=9 * i)) for i in range(3)]
    size = make_pool(schema).bytes_needed(manifests[0])
    pool = make_pool(
        schema, total_bytes=2 * size, memory=RangeMemory(torch.zeros(2 * size, dtype=torch.uint8))
    )
    (tmp_path / "damaged").write_bytes(bytes((tmp_path / "2").stat().st_size))
    for _ in range(3):
        with pytest.raises(PayloadError, match="sha256"):
            pool.read(manifests[2], str(tmp_path / "damaged"))
    for index in (0, 1):
        pool.read(manifests[index], str(tmp_path / f"{index}"))
    held = pool.get(manifests[0].digest)
    assert held is not None
    before = [layer.clone() for layer in held.layers]
    pool.drop(manifests[0].digest)
    with pytest.raises(CapacityError, match="still being copied from"):
        pool.read(manifests[2], str(tmp_path / "2"))
    assert all(torch.equal(a, b) for a, b in zip(before, held.layers, strict=True))
    del held
    pool.read(manifests[2], str(tmp_path / "2"))
    assert pool.used_bytes == 2 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scales", [(1.0,), (0.3,), (2.0, -0.7)])
def test_payloads_in_the_compute_dtype_have_the_bits_of_others(
    tmp_path: Path, schema: LoraSchema, dtype: torch.dtype, scales: tuple[float, ...]
) -> None:
    """Read to where they stay and scaled there, or converted: float64 of the stored values, rounded once."""
    site = next(site for site in schema.sites if len(site.slices) == 2)
    weights = random_site(site, 8, scales=scales)
    stored = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}[dtype]
    manifest = write(tmp_path / "p", schema, [weights], dtype=PayloadDtype(stored))
    pool = make_pool(schema, dtype=dtype)
    pool.read(manifest, str(tmp_path / "p"))
    adapter = pool.get(manifest.digest)
    assert adapter is not None
    placed = adapter.layout.layers[0].sites[0]
    values = torch.from_numpy(weights.b).to(dtype).to(torch.float64)
    rows = [slice_.out_features for slice_ in site.slices]
    factors = (
        torch.tensor(scales, dtype=torch.float32)
        .to(torch.float64)
        .expand(2)
        .repeat_interleave(torch.tensor(rows))
    )
    expected = (values * factors[:, None]).to(torch.float32).to(dtype)
    begin = placed.b.offset
    found = adapter.layers[0][begin : begin + expected.numel() * dtype.itemsize].view(dtype)
    assert torch.equal(found.view(expected.shape), expected)
