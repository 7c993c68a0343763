"""Uploads of both clients: what is sent, what is refused unsent, how a broken one goes on."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import lorikeet_client as lk
from lorikeet.adapters.v1 import adapter_pb2
from lorikeet_client.upload import CHUNK_BYTES, plan_upload
from lorikeet_contract.status import StatusCode
from tests.support.fake_services import TOKEN, FakeServices, service_error

WEIGHTS = "adapter_model.safetensors"
BIG = bytes(range(256)) * (3 * 4096) + b"tail"  # three whole chunks and four bytes


def make_directory(path: Path, **files: bytes) -> Path:
    """A directory with a config, weights, and files beside them; names with __ for dots."""
    path.mkdir(exist_ok=True)
    for name, data in {"adapter_config__json": b"{}", "adapter_model__safetensors": BIG, **files}.items():
        (path / name.replace("__", ".")).write_bytes(data)
    return path


def received(fakes: FakeServices) -> dict[str, bytes]:
    """The files of the only upload."""
    (files,) = fakes.adapters.received.values()
    return {name: bytes(data) for name, data in files.items()}


async def test_files_arrive_whole(both: Any, fakes: FakeServices, tmp_path: Path) -> None:
    """Every byte, in chunks of 1 MiB; files that are no adapter's stay behind."""
    directory = make_directory(
        tmp_path / "a", README__md=b"#", adapter_model__bin=b"evil", optimizer__pt=b"x"
    )
    result = await both.call(
        "upload_adapter",
        directory,
        "demo/a",
        aliases=["prod"],
        validate_only=True,
        expert_packing=lk.ExpertPacking.EXPERT_MAJOR,
        base_digest="b" * 64,
        expert_orientation=lk.ExpertOrientation.EXCHANGED,
    )
    assert result.created
    assert received(fakes) == {"adapter_config.json": b"{}", WEIGHTS: BIG}
    assert fakes.adapters.chunk_sizes == [2, CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES, 4]
    (header,) = fakes.adapters.headers
    assert (header.adapter, list(header.aliases), header.validate_only) == ("demo/a", ["prod"], True)
    assert header.base_digest == "b" * 64
    assert header.expert_packing == adapter_pb2.EXPERT_PACKING_EXPERT_MAJOR
    assert header.expert_orientation == adapter_pb2.EXPERT_ORIENTATION_EXCHANGED


async def test_a_broken_upload_goes_on_where_it_stopped(
    both: Any, fakes: FakeServices, tmp_path: Path
) -> None:
    """UNAVAILABLE after the second MiB: the third chunk is the next one sent."""
    fakes.adapters.break_after_bytes = 2 * CHUNK_BYTES
    progress: list[lk.UploadProgress] = []
    await both.call("upload_adapter", make_directory(tmp_path / "a"), "demo/a", progress=progress.append)
    assert received(fakes)[WEIGHTS] == BIG
    assert sum(fakes.adapters.chunk_sizes) == len(BIG) + 2  # nothing twice
    assert fakes.faults.calls == ["GetUpload", "Upload", "GetUpload", "Upload"]
    assert progress[-1] == lk.UploadProgress(len(BIG) + 2, len(BIG) + 2, WEIGHTS)


async def test_whoever_uploads_hears_that_it_is_tried_again(
    both: Any, fakes: FakeServices, tmp_path: Path
) -> None:
    """Both for a question that is repeated and for the upload itself, with what failed and the pause."""
    heard: list[tuple[str, float]] = []
    fakes.faults.add("GetUpload", service_error(StatusCode.UNAVAILABLE, "asking", retry_after_s=0.001))
    fakes.faults.add("Upload", service_error(StatusCode.UNAVAILABLE, "sending", retry_after_s=0.002))
    directory = make_directory(tmp_path / "a")

    def on_retry(error: lk.UnavailableError, pause_s: float) -> None:
        heard.append((error.message, pause_s))

    await both.call("upload_adapter", directory, "demo/a", on_retry=on_retry)
    assert heard == [("asking", 0.001), ("sending", 0.002)]


async def test_a_new_process_goes_on_too(both: Any, fakes: FakeServices, tmp_path: Path) -> None:
    """The same upload has the same id, so a second start finds what the first one left."""
    directory = make_directory(tmp_path / "a")
    plan = plan_upload(directory, "demo/a")
    fakes.adapters.received[plan.header.request_id] = {
        "adapter_config.json": bytearray(b"{}"),
        WEIGHTS: bytearray(BIG[:CHUNK_BYTES]),
    }
    await both.call("upload_adapter", directory, "demo/a")
    assert sum(fakes.adapters.chunk_sizes) == len(BIG) - CHUNK_BYTES
    assert received(fakes)[WEIGHTS] == BIG


def test_the_id_follows_content_and_options(tmp_path: Path) -> None:
    """Other bytes, another name or other options are another upload; a given id stands."""
    directory = make_directory(tmp_path / "a")
    ids = [plan_upload(directory, "demo/a").header.request_id for _ in range(2)]
    ids.append(plan_upload(directory, "demo/b").header.request_id)
    ids.append(plan_upload(directory, "demo/a", validate_only=True).header.request_id)
    make_directory(directory, adapter_config__json=b"{ }")
    ids.append(plan_upload(directory, "demo/a").header.request_id)
    assert ids[0] == ids[1]
    assert len(set(ids)) == 4
    assert plan_upload(directory, "demo/a", request_id="mine").header.request_id == "mine"


async def test_refusals_of_the_server_come_through(both: Any, fakes: FakeServices, tmp_path: Path) -> None:
    """An answer before the files were sent ends the upload with its own words, in one try."""
    fakes.faults.add("Upload", service_error(StatusCode.INVALID_ARGUMENT, "no such module"))
    with pytest.raises(lk.InvalidRequestError, match="no such module"):
        await both.call("upload_adapter", make_directory(tmp_path / "a"), "demo/a")
    assert fakes.faults.calls.count("Upload") == 1


async def test_a_file_that_changes_under_way_is_refused(
    both: Any, fakes: FakeServices, tmp_path: Path
) -> None:
    """Never half of one version and half of another."""
    directory = make_directory(tmp_path / "a")

    def grow(progress: lk.UploadProgress) -> None:
        if progress.sent_bytes == 0:
            with (directory / WEIGHTS).open("ab") as weights:
                weights.write(b"more")

    with pytest.raises(lk.UploadRefusedError, match="changed while it was uploaded"):
        await both.call("upload_adapter", directory, "demo/a", progress=grow)


def _link_weights(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).symlink_to("/etc/hostname")


def _link_config(directory: Path) -> None:
    (directory / "adapter_config.json").unlink()
    (directory / "adapter_config.json").symlink_to("/etc/passwd")


def _folder(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).mkdir()


def _pipe(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    os.mkfifo(directory / WEIGHTS)


def _pickle_only(directory: Path) -> None:
    (directory / WEIGHTS).rename(directory / "adapter_model.bin")


def _no_weights(directory: Path) -> None:
    (directory / WEIGHTS).unlink()


def _no_config(directory: Path) -> None:
    (directory / "adapter_config.json").unlink()


def _shards_without_index(directory: Path) -> None:
    (directory / WEIGHTS).rename(directory / "adapter_model-00001-of-00002.safetensors")


def _whole_and_shards(directory: Path) -> None:
    (directory / "adapter_model-00001-of-00002.safetensors").write_bytes(b"x")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_link_weights, r"adapter_model.safetensors is a symbolic link.*cp -rL"),
        (_link_config, r"adapter_config.json is a symbolic link"),
        (_folder, "is not a regular file"),
        (_pipe, "is not a regular file"),
        (_pickle_only, "'adapter_model.bin' is a pickle.*safe_serialization=True"),
        (_no_weights, "adapter_model.safetensors is missing"),
        (_no_config, "adapter_config.json is missing"),
        (_shards_without_index, "index.json is missing beside 1 shards"),
        (_whole_and_shards, "keep the one or the others"),
    ],
)
async def test_refused_unsent(
    both: Any, fakes: FakeServices, tmp_path: Path, damage: Any, words: str
) -> None:
    """What can never be accepted is refused here, with what to do, and nothing is sent."""
    damage(make_directory(tmp_path / "a"))
    with pytest.raises(lk.UploadRefusedError, match=words) as caught:
        await both.call("upload_adapter", tmp_path / "a", "demo/a")
    assert "root:" not in str(caught.value)  # never a linked file's content
    assert fakes.faults.calls == []


async def test_not_a_directory(both: Any, tmp_path: Path) -> None:
    """A file, or nothing at all."""
    with pytest.raises(lk.UploadRefusedError, match="is not a directory"):
        await both.call("upload_adapter", tmp_path / "nothing", "demo/a")


async def test_cancelling_the_task_ends_the_upload(fakes: FakeServices, tmp_path: Path) -> None:
    """The thread that sends does not outlive the task: the server sees the call end."""
    started, ended = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hang(request_iterator: Any, context: Any) -> Any:
        context.add_callback(ended.set)
        loop.call_soon_threadsafe(started.set)
        ended.wait(10)

    fakes.adapters.on_upload = hang
    async with lk.AsyncLorikeet(fakes.address, fakes.address, TOKEN) as client:
        task = asyncio.create_task(client.upload_adapter(make_directory(tmp_path / "a"), "demo/a"))
        await asyncio.wait_for(started.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await asyncio.to_thread(ended.wait, 5)
