"""The disk cache, what is streamed into it, and the stores behind it."""

import dataclasses
import errno
import hashlib
import os
import shutil
from pathlib import Path

import obstore
import pytest
from obstore.store import MemoryStore

from inference_service.domain.errors import (
    AdapterTooLargeError,
    DiskCacheError,
    PayloadError,
    PayloadMissingError,
)
from inference_service.engine.payload_cache import PayloadCache, PayloadReceiver
from inference_service.engine.payload_source import CachedPayloadSource
from lorikeet_contract.manifest import Manifest, PayloadLayer
from tests.support.fake_device import make_manifest


def receive(directory: Path, name: str, size: int = 10) -> Manifest:
    """Stream a revision into a cache directory."""
    manifest = make_manifest(name, size)
    receiver = PayloadReceiver(str(directory), manifest.digest, manifest.to_json())
    receiver.write(0, b"x" * (size // 2))
    receiver.write(size // 2, b"y" * (size - size // 2))
    receiver.commit()
    return manifest


def store_locally(root: Path, name: str, size: int = 10) -> tuple[Manifest, str]:
    """Put a revision into a local store."""
    manifest = make_manifest(name, size)
    directory = root / "revisions" / manifest.digest
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_bytes(manifest.to_json())
    (directory / "payload").write_bytes(bytes(size))
    return manifest, f"revisions/{manifest.digest}"


def leftovers(directory: Path) -> list[str]:
    """What lies around of unfinished transfers."""
    return [path.name for path in (directory / ".incoming").iterdir()]


def test_streamed_revision_is_found_whole(tmp_path: Path) -> None:
    """Manifest and bytes, and nothing left in the incoming folder."""
    manifest = receive(tmp_path, "a")
    found = PayloadCache(str(tmp_path), 1000).find(manifest.digest)
    assert found is not None
    assert found[0] == manifest
    assert Path(found[1]).read_bytes() == b"xxxxxyyyyy"
    assert leftovers(tmp_path) == []


def test_same_revision_streamed_twice(tmp_path: Path) -> None:
    """The second is dropped; one stays."""
    assert receive(tmp_path, "a") == receive(tmp_path, "a")
    assert len(PayloadCache(str(tmp_path), 1000).digests()) == 1
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([(0, b"123")], "ended after 3 of 10"),
        ([(0, b"123"), (2, b"4")], "offset 2 came where 3"),
        ([(0, b"1" * 11)], "more than the 10 bytes"),
    ],
)
def test_wrong_chunks_leave_nothing(tmp_path: Path, chunks: list[tuple[int, bytes]], words: str) -> None:
    """Short, out of order, too long."""
    manifest = make_manifest("a", 10)
    receiver = PayloadReceiver(str(tmp_path), manifest.digest, manifest.to_json())
    with pytest.raises(PayloadError, match=words):
        for offset, data in chunks:
            receiver.write(offset, data)
        receiver.commit()
    receiver.discard()
    assert PayloadCache(str(tmp_path), 1000).digests() == []
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("digest", ["../../etc", "", "A" * 64, "f" * 64])
def test_manifest_must_be_the_digests(tmp_path: Path, digest: str) -> None:
    """A digest is never a path, and names exactly one manifest."""
    with pytest.raises(PayloadError):
        PayloadReceiver(str(tmp_path), digest, make_manifest("a").to_json())
    assert list(tmp_path.iterdir()) == []


def test_damaged_cache_entry_counts_as_absent(tmp_path: Path) -> None:
    """Cut short on disk: removed, so that it can be fetched again."""
    manifest = receive(tmp_path, "a")
    (tmp_path / manifest.digest / "payload").write_bytes(b"x")
    cache = PayloadCache(str(tmp_path), 1000)
    assert cache.find(manifest.digest) is None
    assert cache.digests() == []


def test_cache_drops_the_least_recently_used(tmp_path: Path) -> None:
    """Finding counts as use; the one just fetched stays even where it alone exceeds the bound."""
    cache = PayloadCache(str(tmp_path), 25)
    manifests = [receive(tmp_path, name) for name in "abc"]
    for age, manifest in enumerate(manifests):
        os.utime(tmp_path / manifest.digest, (age, age))
    cache.find(manifests[0].digest)
    cache.trim(keep=manifests[2].digest)
    assert set(cache.digests()) == {manifests[0].digest, manifests[2].digest}
    cache.max_bytes = 5
    cache.trim(keep=manifests[2].digest)
    assert cache.digests() == [manifests[2].digest]


def test_local_store_is_read_in_place(tmp_path: Path) -> None:
    """No copy; removing from the cache does not touch the store."""
    manifest, path = store_locally(tmp_path / "a store", "a")
    source = CachedPayloadSource(PayloadCache(str(tmp_path / "cache"), 1000))
    source.set_store_url((tmp_path / "a store").as_uri())
    found, payload = source.fetch(manifest.digest, path)
    assert (found, Path(payload).parents[2]) == (manifest, tmp_path / "a store")
    assert source.cached() == []
    source.remove(manifest.digest)
    assert Path(payload).exists()


def test_object_store_is_copied_into_the_cache(tmp_path: Path) -> None:
    """And read from there the next time."""
    manifest = make_manifest("a", 20)
    store = MemoryStore()
    obstore.put(store, f"revisions/{manifest.digest}/manifest.json", manifest.to_json())
    obstore.put(store, f"revisions/{manifest.digest}/payload", b"z" * 20)
    source = CachedPayloadSource(PayloadCache(str(tmp_path), 1000))
    source._store_url, source._store = "s3://bucket", store
    _, payload = source.fetch(manifest.digest, f"revisions/{manifest.digest}")
    assert Path(payload).read_bytes() == b"z" * 20
    source._store = MemoryStore()
    assert source.fetch(manifest.digest, f"revisions/{manifest.digest}")[1] == payload
    assert leftovers(tmp_path) == []


def test_object_store_faults(tmp_path: Path) -> None:
    """Absent, cut short and larger than the cache: each its own error, nothing left behind."""
    manifest = make_manifest("a", 20)
    store = MemoryStore()
    source = CachedPayloadSource(PayloadCache(str(tmp_path), 15))
    source._store_url, source._store = "s3://bucket", store
    path = f"revisions/{manifest.digest}"
    with pytest.raises(PayloadError, match="is missing in the artifact store"):
        source.fetch(manifest.digest, path)
    obstore.put(store, f"{path}/manifest.json", manifest.to_json())
    obstore.put(store, f"{path}/payload", b"z" * 19)
    with pytest.raises(AdapterTooLargeError, match="20 bytes, the disk cache at most 15"):
        source.fetch(manifest.digest, path)
    source._cache.max_bytes = 100
    with pytest.raises(PayloadError, match="ended after 19 of 20"):
        source.fetch(manifest.digest, path)
    assert (source.cached(), leftovers(tmp_path)) == ([], [])


@pytest.mark.parametrize("path", ["../secret", "/etc", "revisions/../../x"])
def test_store_path_stays_in_the_store(tmp_path: Path, path: str) -> None:
    """Whatever the catalog says."""
    source = CachedPayloadSource(PayloadCache(str(tmp_path), 1000))
    source.set_store_url(tmp_path.as_uri())
    with pytest.raises(PayloadError, match="leaves the store"):
        source.fetch("f" * 64, path)


def test_missing_everywhere(tmp_path: Path) -> None:
    """No store known, no path, or a store that is not mounted here: only a stream can bring it."""
    source = CachedPayloadSource(PayloadCache(str(tmp_path), 1000))
    for url, path in (("", "revisions/x"), (tmp_path.as_uri(), ""), (tmp_path.as_uri(), "revisions/x")):
        source.set_store_url(url)
        with pytest.raises(PayloadMissingError):
            source.fetch("f" * 64, path)


def test_missing_in_a_store_that_is_here(tmp_path: Path) -> None:
    """A failure at once: waiting for a stream of what the manager does not have either would be in vain."""
    (tmp_path / "store" / "revisions").mkdir(parents=True)
    source = CachedPayloadSource(PayloadCache(str(tmp_path / "cache"), 1000))
    source.set_store_url((tmp_path / "store").as_uri())
    with pytest.raises(PayloadError, match="is missing") as error:
        source.fetch("f" * 64, "revisions/x")
    assert not isinstance(error.value, PayloadMissingError)
    assert str(tmp_path) not in error.value.message


@pytest.mark.parametrize("damage", ["manifest gone", "manifest a folder", "payload a folder", "file", "link"])
def test_a_cache_entry_in_any_disorder_counts_as_absent(tmp_path: Path, damage: str) -> None:
    """It is cleared away, so that the revision can be received again."""
    manifest = receive(tmp_path, "a")
    entry = tmp_path / manifest.digest
    match damage:
        case "manifest gone":
            (entry / "manifest.json").unlink()
        case "manifest a folder" | "payload a folder":
            path = entry / ("payload" if "payload" in damage else "manifest.json")
            path.unlink()
            (path / "inner").mkdir(parents=True)
        case _:
            shutil.rmtree(entry)
            entry.write_text("x") if damage == "file" else entry.symlink_to("nowhere")
    cache = PayloadCache(str(tmp_path), 1000)
    assert cache.find(manifest.digest) is None
    cache.trim(keep="")
    assert receive(tmp_path, "a") == manifest
    assert cache.find(manifest.digest) is not None


def test_a_stream_takes_the_place_of_a_damaged_copy_but_not_of_a_whole_one(tmp_path: Path) -> None:
    """What could not be removed before is moved aside now; a whole one is left alone, being the same."""
    manifest = receive(tmp_path, "a")
    payload = tmp_path / manifest.digest / "payload"
    whole = payload.stat().st_ino
    assert receive(tmp_path, "a") == manifest
    assert payload.stat().st_ino == whole
    payload.write_bytes(b"cut")
    receive(tmp_path, "a")
    assert payload.read_bytes() == b"xxxxxyyyyy"
    layer = PayloadLayer(None, 0, 10, hashlib.sha256(b"xxxxxyyyyy").hexdigest(), ())
    checked = dataclasses.replace(make_manifest("b", 10), layers=(layer,))
    for _ in range(2):
        receiver = PayloadReceiver(str(tmp_path), checked.digest, checked.to_json())
        receiver.write(0, b"xxxxxyyyyy")
        receiver.commit()
        payload = tmp_path / checked.digest / "payload"
        assert payload.read_bytes() == b"xxxxxyyyyy"
        payload.write_bytes(b"xxxxxyyyyz")
    assert leftovers(tmp_path) == []


def test_what_cannot_be_removed_is_said_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """True only where a copy was there and is gone."""
    manifest = receive(tmp_path, "a")
    cache = PayloadCache(str(tmp_path), 1000)
    assert not cache.remove("f" * 64)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        assert not cache.remove(manifest.digest)
    assert cache.remove(manifest.digest)


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the operator's paths; a write that took only a part is continued."""
    manifest = make_manifest("a", 20)
    receiver = PayloadReceiver(str(tmp_path), manifest.digest, manifest.to_json())
    room = [7]

    class Disk:
        def write(self, data: memoryview) -> int:
            taken = min(room[0], len(data))
            if not taken:
                raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))
            room[0] -= taken
            return taken

        def close(self) -> None:
            pass

    receiver._file.close()
    receiver._file = Disk()  # type: ignore[assignment]
    with pytest.raises(DiskCacheError, match="No space left on device") as error:
        receiver.write(0, b"z" * 20)
    assert str(tmp_path) not in error.value.message
    receiver.discard()
    assert leftovers(tmp_path) == []


def test_room_is_made_by_age(tmp_path: Path) -> None:
    """The oldest go until enough is freed; what is asked for and cannot be freed is told."""
    cache = PayloadCache(str(tmp_path), 1000)
    manifests = [receive(tmp_path, name) for name in "abc"]
    for age, manifest in enumerate(manifests):
        os.utime(tmp_path / manifest.digest, (age, age))
    assert cache.make_room(1)
    assert set(cache.digests()) == {m.digest for m in manifests[1:]}
    assert not cache.make_room(1000, keep=manifests[1].digest)
    assert cache.digests() == [manifests[1].digest]


def test_an_unreadable_store_is_an_error_without_paths(tmp_path: Path) -> None:
    """A folder where the manifest should be: this text reaches the tenant."""
    manifest, path = store_locally(tmp_path / "store", "a")
    (tmp_path / "store" / path / "manifest.json").unlink()
    (tmp_path / "store" / path / "manifest.json").mkdir()
    source = CachedPayloadSource(PayloadCache(str(tmp_path / "cache"), 1000))
    source.set_store_url((tmp_path / "store").as_uri())
    with pytest.raises(PayloadError, match="cannot be read from the artifact store") as error:
        source.fetch(manifest.digest, path)
    assert str(tmp_path) not in error.value.message
