"""Staged uploads: resumed where they broke, taken over, refused by name, never outside their directory."""

import errno
import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from adapter_manager.application.ingest import (
    IngestLimits,
    IngestTarget,
    UploadFile,
    UploadSession,
    UploadStaging,
)
from adapter_manager.domain.errors import (
    InvalidAdapterError,
    InvalidRequestError,
    LimitExceededError,
    UploadConflictError,
    UploadNotFoundError,
)
from tests.support.lora_schemas import FIXTURES, qwen3_moe

ADAPTER = FIXTURES / "adapters" / "qwen3_moe" / "attn-r8"
TARGET = IngestTarget(qwen3_moe(), "b" * 64)
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def contents() -> dict[str, bytes]:
    """The files of a good adapter."""
    return {p.name: p.read_bytes() for p in sorted(ADAPTER.iterdir())}


@pytest.fixture
def staging(tmp_path: Path) -> UploadStaging:
    """An empty staging directory."""
    return UploadStaging(tmp_path / "staging")


def announced(contents: dict[str, bytes], **sizes: int) -> tuple[UploadFile, ...]:
    """What the client's header says of these files."""
    return tuple(
        UploadFile(name, sizes.get(name, len(data)), hashlib.sha256(data).hexdigest())
        for name, data in contents.items()
    )


def send(session: UploadSession, contents: dict[str, bytes], step: int = 1000) -> None:
    """Send what is missing."""
    for name, data in contents.items():
        for offset in range(session.received_bytes[name], len(data), step):
            session.write(name, offset, data[offset : offset + step])


def files_below(path: Path) -> set[str]:
    """Every file and directory."""
    return {str(p.relative_to(path)) for p in path.rglob("*")}


def test_upload_becomes_a_revision_and_leaves_nothing(
    staging: UploadStaging, contents: dict[str, bytes], tmp_path: Path
) -> None:
    """Chunks of any size; the payload is there until the session ends."""
    session = staging.open("t", "a", "r1", announced(contents))
    send(session, contents, step=777)
    session.finish()
    built = session.build(TARGET)
    assert built.payload_path.stat().st_size == built.manifest.payload_bytes
    session.discard()
    session.discard()
    assert files_below(tmp_path / "staging") == set()
    with pytest.raises(UploadConflictError):
        session.write(WEIGHTS, 0, b"x")


def test_broken_upload_is_resumed_by_a_later_process(
    staging: UploadStaging, contents: dict[str, bytes], tmp_path: Path
) -> None:
    """Bytes survive the stream and the process; their digest is made from the disk."""
    session = staging.open("t", "a", "r1", announced(contents))
    session.write("adapter_config.json", 0, contents["adapter_config.json"])
    session.write(WEIGHTS, 0, contents[WEIGHTS][:5000])
    session.release()
    later = UploadStaging(tmp_path / "staging")
    assert later.received_bytes("t", "a", "r1") == {
        "adapter_config.json": len(contents["adapter_config.json"]),
        WEIGHTS: 5000,
    }
    session = later.open("t", "a", "r1", announced(contents))
    send(session, contents)
    session.finish()
    assert session.build(TARGET).report.tensors_used == 24


def test_uploads_are_apart_by_tenant_adapter_and_request(
    staging: UploadStaging, contents: dict[str, bytes]
) -> None:
    """Nobody resumes another's upload."""
    session = staging.open("t", "a", "r1", announced(contents))
    session.write(WEIGHTS, 0, b"1234")
    session.release()
    for tenant, adapter, request_id in (("u", "a", "r1"), ("t", "b", "r1"), ("t", "a", "r2"), ("t", "a", "")):
        with pytest.raises(UploadNotFoundError):
            staging.received_bytes(tenant, adapter, request_id)
        other = staging.open(tenant, adapter, request_id, announced(contents))
        assert set(other.received_bytes.values()) == {0}


def test_new_stream_takes_over_and_the_old_one_is_cut_off(
    staging: UploadStaging, contents: dict[str, bytes]
) -> None:
    """A client that lost its connection need not wait for the server to notice."""
    old = staging.open("t", "a", "r1", announced(contents))
    old.write(WEIGHTS, 0, contents[WEIGHTS][:100])
    new = staging.open("t", "a", "r1", announced(contents))
    assert new.received_bytes[WEIGHTS] == 100
    with pytest.raises(UploadConflictError, match="another stream"):
        old.write(WEIGHTS, 100, b"x")
    with pytest.raises(UploadConflictError):
        old.finish()
    old.discard()
    send(new, contents)
    new.finish()
    new.build(TARGET)


def test_request_id_of_other_files_is_a_conflict(staging: UploadStaging, contents: dict[str, bytes]) -> None:
    """The same id must mean the same files."""
    begun = staging.open("t", "a", "r1", announced(contents))
    send(begun, contents)
    begun.release()
    changed = contents | {"adapter_config.json": b"{}"}
    with pytest.raises(UploadConflictError, match="new request_id"):
        staging.open("t", "a", "r1", announced(changed))


def test_upload_without_request_id_is_gone_when_its_stream_breaks(
    staging: UploadStaging, contents: dict[str, bytes], tmp_path: Path
) -> None:
    """Nobody could ever resume it."""
    session = staging.open("t", "a", "", announced(contents))
    session.write(WEIGHTS, 0, b"1234")
    session.release()
    assert files_below(tmp_path / "staging") == set()


def test_chunks_must_follow_each_other_and_fit(staging: UploadStaging, contents: dict[str, bytes]) -> None:
    """A gap and a repetition name the byte to go on at; too many bytes and unknown files are refused."""
    session = staging.open("t", "a", "r1", announced(contents))
    session.write(WEIGHTS, 0, b"1234")
    for offset in (0, 3, 5):
        with pytest.raises(UploadConflictError) as caught:
            session.write(WEIGHTS, offset, b"x")
        assert caught.value.metadata["received_bytes"] == "4"
    with pytest.raises(InvalidRequestError, match="announced with"):
        session.write(WEIGHTS, 4, bytes(len(contents[WEIGHTS])))
    with pytest.raises(InvalidRequestError, match="not announced"):
        session.write("../../x", 0, b"x")
    with pytest.raises(InvalidRequestError, match="0 of"):
        session.finish()


def test_wrong_digest_is_found_out(staging: UploadStaging, contents: dict[str, bytes]) -> None:
    """One bit on the way."""
    session = staging.open("t", "a", "r1", announced(contents))
    damaged = bytearray(contents[WEIGHTS])
    damaged[-1] ^= 1
    send(session, contents | {WEIGHTS: bytes(damaged)})
    with pytest.raises(InvalidAdapterError, match="sha256"):
        session.finish()


HOSTILE_NAMES = [
    "../x",
    "/abs",
    "a/b",
    "..",
    "",
    ".",
    "x" * 300,
    "adapter_model.safetensors\0",
    "adapter_config.json\r\n",
    "\u0430dapter_config.json",
    "base",
    "README.md",
    "adapter_model.bin",
    "pytorch_model.bin",
    "adapter_model.pt",
    "adapter_model-1-of-2.safetensors",
    "adapter_model-00001-of-00002.safetensors/../x",
    "upload.json",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_b49_hostile_name_is_refused_before_anything_is_written(
    tmp_path: Path, contents: dict[str, bytes], name: str
) -> None:
    """INVALID_ARGUMENT, the name escaped, no file anywhere."""
    staging = UploadStaging(tmp_path / "staging")
    before = files_below(tmp_path)
    with pytest.raises(InvalidAdapterError) as caught:
        staging.open("t", "a", "r1", (*announced(contents), UploadFile(name, 1, "0" * 64)))
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 500
    assert files_below(tmp_path) == before


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((), "adapter_config.json is missing"),
        ((("adapter_config.json", 2, "0" * 64),), "adapter_model.safetensors is missing"),
        ((("adapter_config.json", 2, "0" * 63), (WEIGHTS, 2, "0" * 64)), "sha256"),
        ((("adapter_config.json", 2, "A" * 64), (WEIGHTS, 2, "0" * 64)), "sha256"),
        ((("adapter_config.json", -1, "0" * 64), (WEIGHTS, 2, "0" * 64)), "size_bytes"),
        ((("adapter_config.json", 2, "0" * 64), (WEIGHTS, 2, "0" * 64), (WEIGHTS, 2, "0" * 64)), "twice"),
    ],
)
def test_announcement_is_checked(
    staging: UploadStaging, files: tuple[tuple[str, int, str], ...], words: str
) -> None:
    """Before a byte is taken."""
    with pytest.raises((InvalidAdapterError, InvalidRequestError), match=words):
        staging.open("t", "a", "r1", tuple(UploadFile(*f) for f in files))


@pytest.mark.parametrize(
    ("limits", "sizes", "limit"),
    [
        (IngestLimits(max_upload_bytes=1000), {}, "size of adapter_model.safetensors"),
        (IngestLimits(), {"adapter_config.json": 100 << 20}, "size of adapter_config.json"),
        (IngestLimits(max_files=1), {}, "max_files"),
        (IngestLimits(max_staged_bytes=1000), {}, "max_staged_bytes"),
    ],
)
def test_limits_are_named(
    tmp_path: Path, contents: dict[str, bytes], limits: IngestLimits, sizes: dict[str, int], limit: str
) -> None:
    """And nothing is reserved for what was refused."""
    staging = UploadStaging(tmp_path / "staging", limits)
    with pytest.raises(LimitExceededError) as caught:
        staging.open("t", "a", "r1", announced(contents, **sizes))
    assert caught.value.metadata["limit"] == limit
    assert files_below(tmp_path / "staging") == set()


def test_payload_limit_is_checked_before_writing(tmp_path: Path, contents: dict[str, bytes]) -> None:
    """A rank of 1 in one of many experts may need far more bytes than the upload had."""
    staging = UploadStaging(tmp_path / "staging", IngestLimits(max_payload_bytes=10_000))
    session = staging.open("t", "a", "r1", announced(contents))
    send(session, contents)
    session.finish()
    with pytest.raises(LimitExceededError, match="canonical form"):
        session.build(TARGET)


def test_staged_bytes_are_given_back(tmp_path: Path, contents: dict[str, bytes]) -> None:
    """An upload that ended makes room for the next; what waits on the disk does not, whoever sent it."""
    total = sum(len(d) for d in contents.values())
    staging = UploadStaging(tmp_path / "staging", IngestLimits(max_staged_bytes=total))
    staging.open("t", "a", "r1", announced(contents)).discard()
    waiting = staging.open("t", "a", "r2", announced(contents))
    send(waiting, contents)
    waiting.release()
    with pytest.raises(LimitExceededError, match="max_staged_bytes"):
        staging.open("other", "a", "r3", announced(contents))
    assert staging.expire(-1) == 1
    staging.open("other", "a", "r3", announced(contents))


def test_announcing_costs_nobody_else(tmp_path: Path, contents: dict[str, bytes]) -> None:
    """A tenant that announces all it may, and sends nothing, keeps nobody else out."""
    total = sum(len(d) for d in contents.values())
    limits = IngestLimits(max_upload_bytes=total, max_staged_bytes=total)
    staging = UploadStaging(tmp_path / "staging", limits)
    held = staging.open("greedy", "a", "r1", announced(contents))
    with pytest.raises(LimitExceededError, match="max_tenant_staged_bytes"):
        staging.open("greedy", "a", "r2", announced(contents))
    staging.open("other", "a", "r1", announced(contents)).discard()
    held.release()
    assert files_below(tmp_path / "staging") == set()
    again = UploadStaging(tmp_path / "staging", limits)
    again.open("greedy", "a", "r2", announced(contents))


def test_a_restart_remembers_whose_bytes_wait(tmp_path: Path, contents: dict[str, bytes]) -> None:
    """The share of a tenant counts what an earlier process received of it."""
    total = sum(len(d) for d in contents.values())
    limits = IngestLimits(max_upload_bytes=total, max_staged_bytes=4 * total)
    former = UploadStaging(tmp_path / "staging", limits).open("t", "a", "r1", announced(contents))
    send(former, contents)
    former.release()
    staging = UploadStaging(tmp_path / "staging", limits)
    with pytest.raises(LimitExceededError, match="max_tenant_staged_bytes"):
        staging.open("t", "a", "r2", announced(contents))
    staging.open("other", "a", "r2", announced(contents))


def test_only_idle_uploads_expire(staging: UploadStaging, contents: dict[str, bytes], tmp_path: Path) -> None:
    """Held ones stay, however old; released ones go when nothing was written for long enough."""
    held = staging.open("t", "a", "held", announced(contents))
    left = staging.open("t", "a", "left", announced(contents))
    send(left, contents)
    left.release()
    for path in (tmp_path / "staging").rglob("*"):
        os.utime(path, (time.time() - 100,) * 2)
    assert staging.expire(1000) == 0
    assert staging.expire(50) == 1
    with pytest.raises(UploadNotFoundError):
        staging.received_bytes("t", "a", "left")
    send(held, contents)
    held.finish()


def test_refused_adapter_leaves_nothing_after_discard(
    staging: UploadStaging, contents: dict[str, bytes], tmp_path: Path
) -> None:
    """A failed build writes no payload that stays."""
    config = json.loads(contents["adapter_config.json"]) | {"r": 3}
    bad = contents | {"adapter_config.json": json.dumps(config).encode()}
    session = staging.open("t", "a", "r1", announced(bad))
    send(session, bad)
    session.finish()
    with pytest.raises(InvalidAdapterError, match="rank"):
        session.build(TARGET)
    session.discard()
    assert files_below(tmp_path / "staging") == set()


def test_what_a_crash_left_half_made_is_cleared(tmp_path: Path) -> None:
    """A directory without an announcement belongs to no upload."""
    (tmp_path / "staging" / "x" / "files").mkdir(parents=True)
    UploadStaging(tmp_path / "staging")
    assert files_below(tmp_path / "staging") == set()


def test_a_restart_keeps_what_was_received_and_drops_half_written_payloads(
    tmp_path: Path, contents: dict[str, bytes]
) -> None:
    """A payload is built anew from the received files; its former bytes are of no use."""
    staging = UploadStaging(tmp_path / "staging")
    session = staging.open("t", "a", "r", announced(contents))
    send(session, contents)
    (directory,) = (tmp_path / "staging").iterdir()
    (directory / "payload-0123").write_bytes(b"half")
    later = UploadStaging(tmp_path / "staging")
    assert not list(directory.glob("payload-*"))
    assert later.received_bytes("t", "a", "r") == {name: len(data) for name, data in contents.items()}


def test_a_completed_upload_is_discarded_unless_a_stream_holds_it(
    tmp_path: Path, contents: dict[str, bytes]
) -> None:
    """Its process died before its own cleaning up; the room is given back too."""
    staging = UploadStaging(tmp_path / "staging")
    session = staging.open("t", "a", "r", announced(contents))
    send(session, contents)
    staging.discard("t", "a", "r")
    assert staging.received_bytes("t", "a", "r")
    session.release()
    staging.discard("t", "a", "r")
    with pytest.raises(UploadNotFoundError):
        staging.received_bytes("t", "a", "r")
    assert not list((tmp_path / "staging").iterdir())


def test_a_disk_that_takes_no_upload_is_named(
    staging: UploadStaging, contents: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Already at its announcement; nothing of it stays."""

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(LimitExceededError, match="No space left") as caught:
        staging.open("t", "a", "r", announced(contents))
    assert caught.value.retry_after_s
    assert not list((tmp_path / "staging").iterdir())
