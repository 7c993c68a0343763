"""The messages of an upload, by the generated classes alone."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet.adapters.v1 import adapter_service_pb2_grpc


def adapter_files(directory: Path) -> list[Path]:
    """What a client uploads of a PEFT directory."""
    return sorted(p for p in directory.iterdir() if p.is_file() and p.suffix in {".json", ".safetensors"})


def upload_parts(
    directory: Path,
    name: str,
    *,
    chunk_bytes: int = 1 << 20,
    received: Mapping[str, int] | None = None,
    stop_after: int | None = None,
    sha256: str | None = None,
    **header: Any,
) -> Iterator[pb.UploadRequest]:
    """A header and chunks.

    Args:
        directory: a PEFT directory.
        name: the adapter to make.
        chunk_bytes: largest chunk.
        received: bytes of each file that are left out.
        stop_after: end the stream after so many chunks.
        sha256: what the header says of every file, instead of the truth.
        header: more fields of the header.
    """
    files = adapter_files(directory)
    heads = [
        pb.FileHeader(
            name=p.name,
            size_bytes=p.stat().st_size,
            sha256=sha256 or hashlib.sha256(p.read_bytes()).hexdigest(),
        )
        for p in files
    ]
    yield pb.UploadRequest(header=pb.UploadHeader(adapter=name, files=heads, **header))
    sent = 0
    for p in files:
        data = p.read_bytes()
        for offset in range((received or {}).get(p.name, 0), len(data), chunk_bytes):
            if sent == stop_after:
                return
            sent += 1
            chunk = data[offset : offset + chunk_bytes]
            yield pb.UploadRequest(chunk=pb.FileChunk(file_name=p.name, offset=offset, data=chunk))


def blocking_upload(
    address: str, token: str, parts: Iterable[pb.UploadRequest], timeout_s: float = 60
) -> pb.UploadResponse:
    """Upload with the blocking client: asyncio's loses a status that comes before the last chunk is sent."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = adapter_service_pb2_grpc.AdapterServiceStub(channel)
        metadata = (("authorization", f"Bearer {token}"),)
        return stub.Upload(iter(parts), metadata=metadata, timeout=timeout_s)
