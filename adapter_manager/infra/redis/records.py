"""Records as JSON: {"etag": 16 hex digits, "schema": version, "record": {...}}, the etag always at byte 9.

The place is fixed so that the commit script compares etags without parsing. Decoding upgrades old schemas.
"""

import secrets
from typing import Any, Generic, TypeVar

import msgspec

from adapter_manager.domain.adapter import Adapter, DigestUse, UploadReceipt
from adapter_manager.domain.errors import RegistrySchemaError
from adapter_manager.domain.node import BaseModel
from adapter_manager.domain.revision_report import RevisionReport
from adapter_manager.domain.tenant import Tenant, TenantUsage, TokenOwner
from adapter_manager.ports import Record, RecordT, Stored

SCHEMA = 1

_T = TypeVar("_T")


class _Envelope(msgspec.Struct, Generic[_T], frozen=True):
    etag: str
    schema: int
    record: _T


class _Header(msgspec.Struct, frozen=True):
    schema: int


# One decoder a type: msgspec compiles it from the dataclass, enums and tuples included.
_DECODERS: dict[type[Any], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(_Envelope[kind])  # pyright: ignore[reportInvalidTypeForm]
    for kind in (
        Tenant,
        TenantUsage,
        TokenOwner,
        Adapter,
        DigestUse,
        BaseModel,
        UploadReceipt,
        RevisionReport,
    )
}
_BY_PREFIX: dict[str, type[Any]] = {
    "tenant": Tenant,
    "usage": TenantUsage,
    "token": TokenOwner,
    "adapter": Adapter,
    "use": DigestUse,
    "model": BaseModel,
}


def encode(record: Record) -> bytes:
    """The record's JSON with a fresh etag."""
    return msgspec.json.encode(_Envelope(secrets.token_hex(8), SCHEMA, record))


def decode(raw: bytes, kind: type[RecordT]) -> Stored[RecordT]:
    """Read a record back.

    Raises:
        RegistrySchemaError: it was written by a newer version, or is not a record at all.
    """
    try:
        schema = msgspec.json.decode(raw, type=_Header).schema
        if schema > SCHEMA:
            raise RegistrySchemaError(
                f"a {kind.__name__} record has schema {schema}, this program knows up to {SCHEMA}; "
                "run the version that wrote it, or a newer one"
            )
        envelope = _DECODERS[kind].decode(raw)
    except msgspec.DecodeError as error:
        raise RegistrySchemaError(
            f"a {kind.__name__} record in the registry is not readable ({error}); was it edited by hand?"
        ) from error
    return Stored(envelope.record, envelope.etag)


def kind_of(record_id: str) -> type[Any]:
    """The record type of an indexed record's id."""
    return _BY_PREFIX[record_id.partition(":")[0]]
