"""A manager's upload path in one process, over stores in memory: every way in, and that nothing is left."""

import asyncio
import hashlib
import math
import random
import stat
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapter_manager.application.ingest import (
    IngestTarget,
    UploadFile,
    UploadStaging,
    ingest_directory,
)
from adapter_manager.application.uploads import UploadHeader, UploadService
from adapter_manager.domain.caller import Caller
from adapter_manager.domain.errors import (
    InvalidAdapterError,
    InvalidRequestError,
    LimitExceededError,
)
from adapter_manager.domain.layout_options import LayoutOptions
from adapter_manager.domain.node import BaseModel
from adapter_manager.infra.artifact_store import open_artifact_store
from lorikeet_bench.ingest.peak_memory import PeakMemory
from lorikeet_contract.adapter_files import is_adapter_file
from lorikeet_contract.manifest import ALIGNMENT, Manifest
from lorikeet_contract.status import ServiceError
from tests.support.fuzz.adapter_draft import Draft
from tests.support.fuzz.adapter_oracle import UndecidedError, expected_deltas
from tests.support.fuzz.drafts import make_draft
from tests.support.fuzz.sources import schema_for
from tests.support.lora_deltas import assert_same, payload_deltas
from tests.support.manager_parts import make_parts
from tests.support.memory_registry import MemoryRegistry

MAX_CPU_S = 2.0
MAX_GROWTH_BYTES = 1 << 30
MAX_RANK = 16
_TENANT = "t"
_ADAPTER = "t/fuzzed"
_REFUSALS = (InvalidAdapterError, InvalidRequestError, LimitExceededError)


@dataclass(frozen=True)
class Outcome:
    """How one directory ended: "loaded" or the error's reason; what it took; if its weights were compared."""

    kind: str
    cpu_s: float
    growth_bytes: int
    is_compared: bool = False


@dataclass
class _Models:
    """Stands for the directory of base models: the one that the next upload is for."""

    model: BaseModel | None = None

    def current(self, *_: Any) -> BaseModel:
        assert self.model is not None
        return self.model


class _Silent:
    def received(self, num_bytes: int) -> None:
        pass

    def timed(self, stage: object) -> AbstractContextManager[object]:
        return nullcontext()


@dataclass
class FuzzWorld:
    """Use inside one event loop; `root` is an empty directory of its own."""

    root: Path
    registry: MemoryRegistry = field(default_factory=MemoryRegistry)

    def __post_init__(self) -> None:
        self._store = open_artifact_store("memory://")
        self._staging_path = self.root / "staging"
        self._staging = UploadStaging(self._staging_path)
        self._parts = make_parts(self.registry, self._store, self.root)
        self._models: Any = _Models()
        self._uploads = UploadService(
            self.registry,
            self._parts.registration,
            self._store,
            self._models,
            self._staging,
            time.time,
            _Silent(),
        )
        (self.root / "sentinel").write_text("untouched")

    async def start(self) -> None:
        """Make the tenant."""
        await self._parts.tenant(_TENANT)

    async def run(self, seed: int, draft: Draft) -> Outcome:
        """Bring the directory in and hold every promise against what comes of it.

        Raises:
            AssertionError: a promise is broken.
            Exception: ingest crashed.
        """
        rng = random.Random(seed)
        before = self._state()
        registry = dict(self.registry.records)
        num_bytes = sum(len(data) for data in draft.files.values())
        memory, start_s = PeakMemory.of_this_process(), time.process_time()
        try:
            if draft.links or rng.random() < 0.3:
                manifest, payload = self._ingest_directory(draft)
            else:
                manifest, payload = await self._upload(seed, rng, draft)
            kind, error = "loaded", None
        except _REFUSALS as refusal:
            kind, error = refusal.reason, refusal
        cpu_s = time.process_time() - start_s
        growth = memory.highest_bytes() - memory.start_bytes
        assert cpu_s < MAX_CPU_S, f"took {cpu_s:.1f} s of processor time"
        assert growth < MAX_GROWTH_BYTES + num_bytes, f"took {growth >> 20} MiB for {num_bytes} bytes"
        if error is not None:
            _check_refusal(error, draft)
            assert dict(self.registry.records) == registry, "a refusal changed the registry"
            assert await self._state_of(before), "a refusal left something behind"
            return Outcome(kind, cpu_s, growth)
        is_compared = _check_payload(manifest, payload, draft)
        if self.registry.records != registry:
            await self._parts.deletion.delete(Caller(_TENANT, is_admin=False), _ADAPTER, "")
        assert await self._state_of(before), "a deleted adapter left something behind"
        return Outcome(kind, cpu_s, growth, is_compared)

    def _ingest_directory(self, draft: Draft) -> tuple[Manifest, bytes]:
        """As tools do, links and all."""
        directory, payload = self.root / "case" / "adapter", self.root / "case" / "payload"
        directory.parent.mkdir()
        try:
            draft.write(directory)
            state = _tree(directory)
            target = IngestTarget(schema_for(draft.model), "b" * 64, MAX_RANK, "float32", draft.model)
            try:
                built = ingest_directory(directory, target, payload)
                return built.manifest, payload.read_bytes()
            except ServiceError:
                assert not payload.exists(), "a refusal left a payload"
                raise
            finally:
                assert _tree(directory) == state, "ingest changed what it read"
        finally:
            _remove(self.root / "case")

    async def _upload(self, seed: int, rng: random.Random, draft: Draft) -> tuple[Manifest, bytes]:
        """As the RPC does, in chunks; at times with files that no client of ours would send."""
        is_raw = rng.random() < 0.2
        files = {n: d for n, d in draft.files.items() if is_raw or is_adapter_file(n)}
        self._models.model = BaseModel(
            draft.model, "Fuzz", "b" * 64, "float32", MAX_RANK, schema_for(draft.model)
        )
        header = UploadHeader(
            adapter=_ADAPTER,
            aliases=(),
            is_validate_only=rng.random() < 0.1,
            request_id=f"r{seed}" if rng.random() < 0.5 else "",
            files=tuple(UploadFile(n, len(d), hashlib.sha256(d).hexdigest()) for n, d in files.items()),
            options=LayoutOptions(),
        )
        step = rng.choice([1 << 20, 1 << 16, 5000])
        async with self._uploads.open(Caller(_TENANT, is_admin=False), header) as upload:
            for name, data in files.items():
                for offset in range(0, len(data), max(step, len(data) // 16)):
                    await upload.write(name, offset, data[offset : offset + max(step, len(data) // 16)])
            if header.is_validate_only:
                assert upload.session is not None
                built = upload.session.build(
                    IngestTarget(schema_for(draft.model), "b" * 64, MAX_RANK, "float32", draft.model)
                )
                payload = built.payload_path.read_bytes()
                result = await upload.finish()
                assert result.revision.digest == built.digest
                return built.manifest, payload
            result = await upload.finish()
        digest = result.revision.digest
        manifest = Manifest.from_json(await self._store.manifest(digest))
        return manifest, b"".join([chunk async for chunk in self._store.payload(digest)])

    def _state(self) -> set[str]:
        return _tree(self.root)

    async def _state_of(self, before: set[str]) -> bool:
        return self._state() == before and not [d async for d in self._store.digests()]


def _check_refusal(error: ServiceError, draft: Draft) -> None:
    """The message is safe to show, and names the thing where one thing alone was changed."""
    assert error.message.isascii(), error.message
    assert error.message.isprintable(), error.message
    assert len(error.message) < 4000
    assert error.metadata, "a refusal has no metadata"
    if isinstance(error, LimitExceededError):
        assert error.metadata["limit"] in error.message or error.metadata["value"] in error.message
    elif len(draft.recipe) == 1:
        words = [w for w in draft.subjects if w.isascii() and w.isprintable() and w] or [error.message]
        assert any(word in error.message for word in words), f"{error.message!r} names none of {words}"


def _check_payload(manifest: Manifest, payload: bytes, draft: Draft) -> bool:
    """Whole, aligned, what its digests say, and what the files mean; False where the meaning is unclear."""
    assert len(payload) == manifest.payload_bytes
    for layer in manifest.layers:
        data = payload[layer.offset : layer.offset + layer.num_bytes]
        assert hashlib.sha256(data).hexdigest() == layer.sha256
        for site in layer.sites:
            assert site.a.offset % ALIGNMENT == site.b.offset % ALIGNMENT == 0
            assert all(math.isfinite(scale) and scale > 0 for scale in site.scales)
    files: Mapping[str, bytes] = {n: d for n, d in draft.files.items() if is_adapter_file(n)}
    schema = schema_for(draft.model)
    try:
        expected = expected_deltas(files, schema)
    except UndecidedError:
        return False
    assert_same(payload_deltas(manifest, payload, schema), expected)
    return True


def _tree(root: Path) -> set[str]:
    """Every path below with its kind and links, files with size and time of writing; links not followed."""
    found = set[str]()
    for path in root.rglob("*"):
        status = path.lstat()
        content = (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else ()
        found.add(f"{path.relative_to(root)} {status.st_mode} {status.st_nlink} {content}")
    return found


def _remove(path: Path) -> None:
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            _remove(child)
        else:
            child.unlink()
    path.rmdir()


async def _new_world(root: Path, number: int) -> FuzzWorld:
    """In a directory of its own, so that what one failure leaves is not told of the next case."""
    path = root / str(number)
    path.mkdir()
    world = FuzzWorld(path)
    await world.start()
    return world


def run_seeds(root: Path, seeds: range, report: Any) -> None:
    """Run all seeds in this process; `report` hears of each before and after."""

    async def main() -> None:
        world = await _new_world(root, -1)
        for seed in seeds:
            report.begin(seed)
            draft = make_draft(seed)
            try:
                outcome = await world.run(seed, draft)
            except Exception as error:  # noqa: BLE001 (a crash is what is looked for)
                report.failed(seed, error)
                world = await _new_world(root, seed)
            else:
                report.ended(seed, outcome)

    asyncio.run(main())
