"""An upload as a plan: which files, their hashes, and the messages to send from any point on. No network."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Unpack

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet_client.adapters import UploadOptions, UploadProgress
from lorikeet_client.enums import to_number
from lorikeet_client.errors import UploadRefusedError
from lorikeet_client.keywords import refuse_unknown, texts
from lorikeet_client.retry import OnRetry, ignore_retry
from lorikeet_contract.adapter_files import InvalidFileError, check_file_set, is_adapter_file

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class UploadFile:
    """A file as it was when the plan was made."""

    path: Path
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """Everything about an upload but the connection."""

    header: pb.UploadHeader
    files: tuple[UploadFile, ...]
    resume: bool
    progress: Callable[[UploadProgress], None]
    on_retry: OnRetry = ignore_retry

    def requests(self, received_bytes: Mapping[str, int]) -> Iterator[pb.UploadRequest]:
        """The header, then the chunks that the server lacks. Reads the files while iterated.

        Raises:
            UploadRefusedError: a file is not what it was when the plan was made.
        """
        yield pb.UploadRequest(header=self.header)
        total = sum(file.size_bytes for file in self.files)
        sent = sum(min(received_bytes.get(file.path.name, 0), file.size_bytes) for file in self.files)
        for file in self.files:
            self.progress(UploadProgress(sent, total, file.path.name))
            for chunk in _chunks(file, received_bytes.get(file.path.name, 0)):
                yield pb.UploadRequest(chunk=chunk)
                # The channel asks for the next message when it has taken this one.
                sent += len(chunk.data)
                self.progress(UploadProgress(sent, total, file.path.name))


def plan_upload(directory: Path | str, name: str, **options: Unpack[UploadOptions]) -> UploadPlan:
    """Check and hash a PEFT directory; reads every file of the adapter once.

    Files beside the adapter's own (a README, a tokenizer, optimizer states) are left out.

    Raises:
        UploadRefusedError: the directory holds no adapter, or one in a form that is never accepted.
    """
    refuse_unknown(options, UploadOptions)
    files = tuple(_read(path) for path in _adapter_files(Path(directory)))
    header = pb.UploadHeader(
        adapter=name,
        aliases=texts(options.get("aliases", ()), "aliases"),
        validate_only=options.get("validate_only", False),
        files=[
            pb.FileHeader(name=file.path.name, size_bytes=file.size_bytes, sha256=file.sha256)
            for file in files
        ],
    )
    if packing := options.get("expert_packing"):
        header.expert_packing = to_number(packing, pb.ExpertPacking, "EXPERT_PACKING_")
    if orientation := options.get("expert_orientation"):
        header.expert_orientation = to_number(orientation, pb.ExpertOrientation, "EXPERT_ORIENTATION_")
    header.base_digest = options.get("base_digest", "")
    # The same upload has the same id in every process, which is what makes it resumable after a crash.
    header.request_id = (
        options.get("request_id") or hashlib.sha256(header.SerializeToString()).hexdigest()[:32]
    )
    return UploadPlan(
        header,
        files,
        options.get("resume", True),
        options.get("progress", lambda _: None),
        options.get("on_retry", ignore_retry),
    )


def _adapter_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise UploadRefusedError(
            f"{directory} is not a directory: give the one that holds adapter_config.json"
        )
    names = sorted(entry.name for entry in directory.iterdir())
    wanted = [name for name in names if is_adapter_file(name)]
    try:
        check_file_set(wanted, beside=names)
    except InvalidFileError as error:
        raise UploadRefusedError(f"{directory}: {error}") from error
    return [directory / name for name in wanted]


def _read(path: Path) -> UploadFile:
    with _open(path) as source:
        size = os.fstat(source.fileno()).st_size
        digest = hashlib.file_digest(source, "sha256")
    return UploadFile(path, size, digest.hexdigest())


def _open(path: Path) -> BufferedReader:
    # A link could point at any file of this machine; O_NOFOLLOW refuses it without a race. O_NONBLOCK keeps
    # a named pipe from blocking the open.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise UploadRefusedError(
                f"{path} is a symbolic link, which is refused: upload a copy (cp -rL {path.parent} COPY)"
            ) from error
        raise UploadRefusedError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UploadRefusedError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def _chunks(file: UploadFile, offset: int) -> Iterator[pb.FileChunk]:
    with _open(file.path) as source:
        if os.fstat(source.fileno()).st_size != file.size_bytes:
            raise UploadRefusedError(f"{file.path} changed while it was uploaded: upload again")
        source.seek(offset)
        while offset < file.size_bytes:
            data = source.read(min(CHUNK_BYTES, file.size_bytes - offset))
            if not data:
                raise UploadRefusedError(f"{file.path} became shorter while it was uploaded: upload again")
            yield pb.FileChunk(file_name=file.path.name, offset=offset, data=data)
            offset += len(data)
