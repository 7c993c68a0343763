"""The artifact store: visible only when whole, idempotent, repaired by a push, and strict about its URL."""

import os
import time
from pathlib import Path

import obstore
import pytest

from adapter_manager.application.ingest import IngestTarget, ingest_directory
from adapter_manager.domain.built_revision import BuiltRevision
from adapter_manager.domain.errors import ArtifactMissingError, ArtifactStoreError
from adapter_manager.infra import durable_files, intact_files
from adapter_manager.infra.artifact_store import (
    InvalidStoreUrlError,
    ObstoreArtifactStore,
    open_artifact_store,
)
from adapter_manager.ports import ArtifactStore
from lorikeet_contract.manifest import Manifest
from tests.support.lora_schemas import FIXTURES, qwen3_moe


@pytest.fixture
def built(tmp_path: Path) -> BuiltRevision:
    """A real revision."""
    directory = FIXTURES / "adapters" / "qwen3_moe" / "attn-r8"
    return ingest_directory(directory, IngestTarget(qwen3_moe(), "b" * 64), tmp_path / "built")


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObstoreArtifactStore:
    """Both kinds of store that need no network."""
    return open_artifact_store((tmp_path / "store").as_uri() if request.param == "file" else "memory://")


async def read(store: ArtifactStore, digest: str, offset: int = 0) -> bytes:
    """The whole payload from an offset."""
    chunks = [chunk async for chunk in store.payload(digest, offset)]
    assert all(0 < len(chunk) <= 1 << 20 for chunk in chunks)
    return b"".join(chunks)


async def test_revision_is_stored_once_and_read_back(
    store: ObstoreArtifactStore, built: BuiltRevision
) -> None:
    """Exact bytes of both files, from any offset."""
    assert not await store.contains(built.digest)
    assert await store.put(built)
    assert not await store.put(built)
    assert await store.contains(built.digest)
    assert Manifest.from_json(await store.manifest(built.digest)) == built.manifest
    payload = built.payload_path.read_bytes()
    assert await read(store, built.digest) == payload
    assert await read(store, built.digest, len(payload) - 3) == payload[-3:]
    assert await read(store, built.digest, len(payload)) == b""
    assert [d async for d in store.digests()] == [built.digest]


async def test_deleted_revision_is_gone_and_may_come_again(
    store: ObstoreArtifactStore, built: BuiltRevision
) -> None:
    """Deleting twice is fine; reading says what to do."""
    await store.put(built)
    await store.delete(built.digest)
    await store.delete(built.digest)
    assert [d async for d in store.digests()] == []
    with pytest.raises(ArtifactMissingError, match="upload the adapter again"):
        await store.manifest(built.digest)
    with pytest.raises(ArtifactMissingError):
        await read(store, built.digest)
    assert await store.put(built)


async def test_payload_without_manifest_is_not_there(
    store: ObstoreArtifactStore, built: BuiltRevision
) -> None:
    """What a crash left between the two writes is listed for cleaning, not served, and put again."""
    await obstore.put_async(store._store, f"revisions/{built.digest}/payload", b"half")
    assert not await store.contains(built.digest)
    assert [d async for d in store.digests()] == [built.digest]
    assert await store.put(built)
    assert await read(store, built.digest) == built.payload_path.read_bytes()


async def test_changed_manifest_is_not_believed(store: ObstoreArtifactStore, built: BuiltRevision) -> None:
    """Its sha256 is its name."""
    await store.put(built)
    changed = built.manifest.to_json().replace(b'"rank":8', b'"rank":7', 1)
    await obstore.put_async(store._store, f"revisions/{built.digest}/manifest.json", changed)
    with pytest.raises(ArtifactMissingError):
        await store.manifest(built.digest)
    assert await store.put(built)
    assert await store.manifest(built.digest) == built.manifest.to_json()


@pytest.mark.parametrize("is_cut", [False, True])
async def test_damaged_local_payload_is_repaired_by_a_push(
    tmp_path: Path, built: BuiltRevision, is_cut: bool
) -> None:
    """A flipped bit and a cut file are both found, and the reader's open file is not changed under it."""
    store = open_artifact_store((tmp_path / "store").as_uri())
    await store.put(built)
    path = tmp_path / "store" / "revisions" / built.digest / "payload"
    good = built.payload_path.read_bytes()
    damaged = good[:-1] if is_cut else bytes([good[0] ^ 1]) + good[1:]
    path.unlink()
    path.write_bytes(damaged)
    assert await store.put(built)
    assert path.read_bytes() == good


async def test_damage_after_a_check_is_seen_by_the_next(tmp_path: Path, built: BuiltRevision) -> None:
    """What was found whole a moment ago is not believed once the file was written to, or is another."""
    store = open_artifact_store((tmp_path / "store").as_uri())
    assert not await store.is_intact(built.digest)
    await store.put(built)
    path = tmp_path / "store" / "revisions" / built.digest / "payload"
    good = path.read_bytes()
    for is_replaced in (False, True):
        assert await store.is_intact(built.digest)
        assert await store.is_intact(built.digest)
        if is_replaced:
            path.unlink()
        path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
        assert not await store.is_intact(built.digest)
        path.unlink()
        path.write_bytes(good)


async def test_damage_that_leaves_no_trace_is_seen_a_minute_later(
    tmp_path: Path, built: BuiltRevision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A medium that lost a bit changes no file's times: no check is believed for long."""
    now_s = time.monotonic()
    monkeypatch.setattr(intact_files.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(intact_files, "_signature", lambda _: (0, 0, 0, 0, 0))
    store = open_artifact_store((tmp_path / "store").as_uri())
    await store.put(built)
    assert await store.is_intact(built.digest)
    path = tmp_path / "store" / "revisions" / built.digest / "payload"
    damaged = bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]
    path.unlink()
    path.write_bytes(damaged)
    for passed_s in (0.0, 59.0):
        monkeypatch.setattr(intact_files.time, "monotonic", lambda passed_s=passed_s: now_s + passed_s)
        assert await store.is_intact(built.digest)
    monkeypatch.setattr(intact_files.time, "monotonic", lambda: now_s + 61)
    assert not await store.is_intact(built.digest)


@pytest.mark.parametrize("name", ["payload", "manifest.json"])
async def test_a_folder_in_a_files_place_is_repaired_by_a_push(
    tmp_path: Path, built: BuiltRevision, name: str
) -> None:
    """It cannot be read, as a file without permission, and nothing can be renamed over it."""
    store = open_artifact_store((tmp_path / "store").as_uri())
    await store.put(built)
    path = tmp_path / "store" / "revisions" / built.digest / name
    good = path.read_bytes()
    path.unlink()
    (path / "inner").mkdir(parents=True)
    assert not await store.is_intact(built.digest)
    assert await store.put(built)
    assert path.read_bytes() == good


async def test_local_put_copies_where_it_cannot_link(
    tmp_path: Path, built: BuiltRevision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file system: the same result."""

    def no_links(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(durable_files.os, "link", no_links)
    store = open_artifact_store((tmp_path / "store").as_uri())
    assert await store.put(built)
    path = tmp_path / "store" / "revisions" / built.digest / "payload"
    assert path.read_bytes() == built.payload_path.read_bytes()
    assert path.stat().st_nlink == 1


async def test_local_put_is_on_the_disk_before_it_returns(
    tmp_path: Path, built: BuiltRevision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both files and the directories that name them are flushed; the payload before the manifest exists."""
    flushed = list[str]()
    fsync = os.fsync

    def record(fd: int) -> None:
        name = str(Path(f"/proc/self/fd/{fd}").readlink())
        flushed.append(os.path.relpath(name, tmp_path / "store"))
        assert not (name.endswith("payload") and (tmp_path / "store" / directory / "manifest.json").exists())
        fsync(fd)

    directory = f"revisions/{built.digest}"
    monkeypatch.setattr(durable_files.os, "fsync", record)
    await open_artifact_store((tmp_path / "store").as_uri()).put(built)
    order = [directory, "revisions", "."]
    assert flushed == [f"{directory}/payload", *order, f"{directory}/manifest.json", *order]


async def test_failing_store_says_so_without_its_paths(tmp_path: Path, built: BuiltRevision) -> None:
    """UNAVAILABLE with a time to retry; the operator's paths stay in the log."""
    root = tmp_path / "store"
    store = open_artifact_store(root.as_uri())
    (root / "revisions").rmdir()
    (root / "revisions").write_text("a file where a directory should be")
    with pytest.raises(ArtifactStoreError) as caught:
        await store.put(built)
    assert str(tmp_path) not in caught.value.message
    assert caught.value.retry_after_s


@pytest.mark.parametrize(
    "url",
    [
        "", "relative/dir", "/abs/dir", "file://host/dir", "file:relative", "http://x/y", "ftp://x/y", "s3://",
        "s3://key:secret@bucket/x", "s3://bucket/x?token=1",
    ],
)  # fmt: skip
def test_url_that_names_no_store_is_refused_at_start(url: str) -> None:
    """Without showing what may be a secret."""
    with pytest.raises(InvalidStoreUrlError) as caught:
        open_artifact_store(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://bucket/some/prefix", "gs://bucket/prefix", "az://container/prefix"])
def test_clouds_open_by_url_and_configuration(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is connected yet."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    assert open_artifact_store(url).url == url


async def test_a_volume_that_is_gone_is_away_and_nothing_is_missing(
    built: BuiltRevision, tmp_path: Path
) -> None:
    """An unmounted directory must not look like lost revisions; it works again when it is back."""
    root = tmp_path / "volume"
    store = open_artifact_store(root.as_uri())
    await store.put(built)
    root.rename(tmp_path / "elsewhere")
    for look in (
        store.manifest(built.digest),
        store.contains(built.digest),
        store.is_intact(built.digest),
    ):
        with pytest.raises(ArtifactStoreError) as error:
            await look
        assert not isinstance(error.value, ArtifactMissingError)
        assert str(tmp_path) not in str(error.value)
    (tmp_path / "elsewhere").rename(root)
    assert await store.contains(built.digest)
