"""What an uploader announces: names, sizes and digests, checked before a byte is taken."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from adapter_manager.application.ingest.limits import IngestLimits
from adapter_manager.domain.errors import InvalidAdapterError, InvalidRequestError, LimitExceededError
from adapter_manager.domain.peft_config import MAX_CONFIG_BYTES
from adapter_manager.domain.safetensors_header import MAX_HEADER_BYTES
from adapter_manager.domain.shown_text import shown
from lorikeet_contract.adapter_files import (
    CONFIG,
    INDEX,
    InvalidFileError,
    check_file_name,
    check_file_set,
)

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class UploadFile:
    """One announced file; `sha256` in lower-case hex."""

    name: str
    size_bytes: int
    sha256: str


def check_upload_files(files: Sequence[UploadFile], limits: IngestLimits) -> None:
    """Check an announcement.

    Raises:
        InvalidAdapterError: a name is none of an adapter's, and never used as a path; or files are missing.
        InvalidRequestError: a size or digest is malformed, or a file is announced twice.
        LimitExceededError: too many or too large.
    """
    if len(files) > limits.max_files:
        raise _too_much("max_files", len(files), limits.max_files)
    try:
        for file in files:
            check_file_name(file.name)
        check_file_set(f.name for f in files)
    except InvalidFileError as error:
        raise InvalidAdapterError(str(error), metadata={"problem": "FILES"}) from None
    seen = set[str]()
    for file in files:
        if file.name in seen:
            raise _malformed(f"file {file.name} is announced twice")
        seen.add(file.name)
        if not _SHA256.fullmatch(file.sha256):
            raise _malformed(f"file {file.name}: sha256 {shown(file.sha256)} is not 64 lower-case hex digits")
        if file.size_bytes < 0:
            raise _malformed(f"file {file.name}: size_bytes is {file.size_bytes}")
        maximum = {CONFIG: MAX_CONFIG_BYTES, INDEX: MAX_HEADER_BYTES}.get(file.name, limits.max_upload_bytes)
        if file.size_bytes > maximum:
            raise _too_much(f"size of {file.name}", file.size_bytes, maximum)
    total = sum(f.size_bytes for f in files)
    if total > limits.max_upload_bytes:
        raise _too_much("max_upload_bytes", total, limits.max_upload_bytes)


def _malformed(problem: str) -> InvalidRequestError:
    return InvalidRequestError(problem, metadata={"field": "header.files"})


def _too_much(limit: str, value: int, maximum: int) -> LimitExceededError:
    return LimitExceededError(
        f"{limit} is {value} in this upload; the maximum is {maximum}",
        metadata={"limit": limit, "value": str(value), "maximum": str(maximum)},
    )
