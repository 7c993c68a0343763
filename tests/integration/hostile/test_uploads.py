"""Links, pickles and archives made to reach files that are not the uploader's, or to run code.

Over raw gRPC, the Python client and the command: each is refused, nothing outside the store is written,
removed or changed, nothing is executed. Sources: NVIDIA/TensorRT-LLM#13391, leejet/stable-diffusion.cpp#1156,
0xShug0/audio.cpp#614, OpenBMB/VoxCPM#267.
"""

import asyncio
import io
import json
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from safetensors.numpy import load_file

from lorikeet_client import CallError, InvalidRequestError, Lorikeet, UploadRefusedError
from tests.support.enclosed_stack import SECRET, SERVED, EnclosedStack, refusal

pytestmark = pytest.mark.asyncio(loop_scope="session")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INVALID = grpc.StatusCode.INVALID_ARGUMENT


class Marked:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self._marker), "w")


def pickled(directory: Path, marker: Path) -> bytes:
    """A bare pickle."""
    return pickle.dumps(Marked(marker))


def torch_zip(directory: Path, marker: Path) -> bytes:
    """A zip as torch.save writes it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Marked(marker)))
    return out.getvalue()


def zip_slip(directory: Path, marker: Path) -> bytes:
    """A zip whose members are absolute, or climb."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(str(marker), "x")
        archive.writestr(f"../../{WEIGHTS}", "x")
    return out.getvalue()


def tar_with_links(directory: Path, marker: Path) -> bytes:
    """A tar with an absolute member and with links."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        member = tarfile.TarInfo(str(marker))
        archive.addfile(member, io.BytesIO(b""))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            link = tarfile.TarInfo(WEIGHTS)
            link.type, link.linkname = kind, "/etc/passwd"
            archive.addfile(link)
    return out.getvalue()


CONTENTS = [pickled, torch_zip, zip_slip, tar_with_links]


@pytest.mark.parametrize("content", CONTENTS)
async def test_pickles_and_archives(
    enclosed: EnclosedStack, directory: Path, tmp_path: Path, content: Any
) -> None:
    """Under a sound file's name they are no safetensors; under their own they are refused unopened."""
    data = content(directory, tmp_path / "marker")
    (directory / WEIGHTS).write_bytes(data)
    assert (await refusal(enclosed.upload(directory, "demo/x")))[0] is INVALID
    assert isinstance(await enclosed.refused_by_client(directory, "demo/x"), InvalidRequestError)
    assert await enclosed.pushed(directory, "demo/x") == 1
    for own in ("adapter_model.bin", "adapter_model.pt", "adapter.zip", "adapter.tar.gz"):
        (directory / WEIGHTS).unlink(missing_ok=True)
        (directory / own).write_bytes(data)
        assert isinstance(await enclosed.refused_by_client(directory, "demo/x"), UploadRefusedError)
        assert await enclosed.pushed(directory, "demo/x") == 1
        (directory / own).unlink()


async def test_a_pickle_beside_sound_weights_stays_unopened(
    enclosed: EnclosedStack, directory: Path, tmp_path: Path
) -> None:
    """It is left out: the adapter is what its safetensors say."""
    (directory / "adapter_model.bin").write_bytes(pickled(directory, tmp_path / "marker"))
    with Lorikeet(
        enclosed.stack.node_address, enclosed.stack.manager_address, enclosed.stack.token
    ) as client:
        checked = await asyncio.to_thread(client.upload_adapter, directory, "demo/x", validate_only=True)
    assert checked.revision.report
    assert checked.revision.report.tensors_used > 0


def link_weights(directory: Path, outside: Path) -> Path:
    """The weights are a symbolic link."""
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).symlink_to(outside / "secret")
    return directory


def link_sound_weights(directory: Path, outside: Path) -> Path:
    """A link to weights that are sound."""
    (directory / WEIGHTS).rename(directory / "real")
    (directory / WEIGHTS).symlink_to("real")
    return directory


def link_config(directory: Path, outside: Path) -> Path:
    """The configuration is a symbolic link."""
    (directory / CONFIG).unlink()
    (directory / CONFIG).symlink_to(outside / "secret")
    return directory


def hard_link(directory: Path, outside: Path) -> Path:
    """The weights are a second name of somebody's file."""
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).hardlink_to(outside / "secret")
    return directory


def hard_link_config(directory: Path, outside: Path) -> Path:
    """So is the configuration."""
    (directory / CONFIG).unlink()
    (directory / CONFIG).hardlink_to(outside / "secret")
    return directory


def linked_parent(directory: Path, outside: Path) -> Path:
    """The directory is reached through a link, and its weights are somebody's file under their own name."""
    (directory / WEIGHTS).write_bytes((outside / "secret").read_bytes())
    link = directory.parent / "link"
    link.symlink_to(directory.parent, target_is_directory=True)
    return link / directory.name


def device(directory: Path, outside: Path) -> Path:
    """A device that never ends."""
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).symlink_to("/dev/zero")
    return directory


def pipe(directory: Path, outside: Path) -> Path:
    """A named pipe, which would hang whoever opens it."""
    (directory / WEIGHTS).unlink()
    os.mkfifo(directory / WEIGHTS)
    return directory


@pytest.mark.parametrize(
    "damage",
    [link_weights, link_sound_weights, link_config, hard_link, hard_link_config, linked_parent, device, pipe],
)
async def test_links_in_directories(
    enclosed: EnclosedStack, directory: Path, tmp_path: Path, damage: Any
) -> None:
    """Refused by client and command, without a word of what is behind; sent as bytes they are no adapter."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text(SECRET)
    damaged = damage(directory, outside)
    refused = await enclosed.refused_by_client(damaged, "demo/x")
    assert isinstance(refused, UploadRefusedError | InvalidRequestError)
    assert not isinstance(refused, CallError) or refused.code == "INVALID_ARGUMENT"
    assert await enclosed.pushed(damaged, "demo/x") == 1
    assert (outside / "secret").read_text() == SECRET
    if damage not in (link_sound_weights, device, pipe):  # sound bytes; no end; no bytes
        assert (await refusal(enclosed.upload(damaged, "demo/x")))[0] is INVALID


async def test_an_index_that_points_elsewhere(enclosed: EnclosedStack, directory: Path) -> None:
    """Shards are what was sent, whatever path the index names."""
    names = list(load_file(directory / WEIGHTS))
    shard = "adapter_model-00001-of-00001.safetensors"
    (directory / WEIGHTS).rename(directory / shard)
    for target in ("../../../etc/passwd", "/etc/passwd", f"../{shard}", "x/../" + shard):
        index = json.dumps({"weight_map": dict.fromkeys(names, target)})
        (directory / f"{WEIGHTS}.index.json").write_text(index)
        assert (await refusal(enclosed.upload(directory, "demo/x")))[0] is INVALID


async def test_the_others_are_served_as_before(enclosed: EnclosedStack) -> None:
    """After all that."""
    name, mark = SERVED
    assert (await enclosed.stack.generate([5], adapter=name, max_tokens=3)).token_ids == [mark] * 3
