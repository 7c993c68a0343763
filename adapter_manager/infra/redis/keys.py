"""Every key that we use in Redis, built here and nowhere else.

All keys carry the one hash tag {lorikeet}, so they lie in one slot and a script may touch any of them, on a
cluster too. One tag instead of one a tenant, because a commit spans tenants (two of them may hold the same
content) and because a registry is small: some kilobytes an adapter, written seldom.

  {lorikeet}:epoch          random id of this registry, made once; a store that lost it lost everything
  {lorikeet}:generation     grows with each commit
  {lorikeet}:changes        sorted set: record id by the generation that changed it last
  {lorikeet}:index          sorted set, all scores 0: ids of all indexed records, for pages in order
  {lorikeet}:restored       hash: the last restore wrote the view of generation `from` and made it `as`
  {lorikeet}:record:<id>    a record; <id> is e.g. tenant:<t>, adapter:<t>/<a>, use:<digest>
"""

import hashlib

from adapter_manager.domain.adapter import Adapter, DigestUse, UploadReceipt
from adapter_manager.domain.node import BaseModel
from adapter_manager.domain.revision_report import RevisionReport
from adapter_manager.domain.tenant import Tenant, TenantUsage, TokenOwner
from adapter_manager.ports import Record

EPOCH = "{lorikeet}:epoch"
GENERATION = "{lorikeet}:generation"
CHANGES = "{lorikeet}:changes"
INDEX = "{lorikeet}:index"
RESTORED = "{lorikeet}:restored"

_RECORD = "{lorikeet}:record:"


def record_key(record_id: str) -> str:
    """The key of the record with this id."""
    return _RECORD + record_id


def tenant_id(tenant: str) -> str:
    """A tenant's own record."""
    return f"tenant:{tenant}"


def usage_id(tenant: str) -> str:
    """What a tenant has."""
    return f"usage:{tenant}"


def token_id(sha256: str) -> str:
    """Whose token it is."""
    return f"token:{sha256}"


def adapter_id(tenant: str, adapter: str) -> str:
    """An adapter."""
    return f"adapter:{tenant}/{adapter}"


def use_id(digest: str) -> str:
    """Who holds a digest's files."""
    return f"use:{digest}"


def model_id(base_digest: str) -> str:
    """A base model."""
    return f"model:{base_digest}"


def receipt_id(tenant: str, request_id: str) -> str:
    """How an upload ended. The request id is the client's text, so its hash stands for it."""
    return f"receipt:{tenant}/{hashlib.sha256(request_id.encode()).hexdigest()}"


def report_id(tenant: str, adapter: str, digest: str) -> str:
    """A revision's upload report."""
    return f"report:{tenant}/{adapter}/{digest}"


def identify(record: Record) -> str:
    """The id of a record."""
    match record:
        case Tenant():
            return tenant_id(record.tenant_id)
        case TenantUsage():
            return usage_id(record.tenant_id)
        case TokenOwner():
            return token_id(record.sha256)
        case Adapter():
            return adapter_id(record.tenant, record.adapter)
        case DigestUse():
            return use_id(record.digest)
        case BaseModel():
            return model_id(record.base_digest)
        case UploadReceipt():
            return receipt_id(record.tenant, record.request_id)
        case RevisionReport():
            return report_id(record.tenant, record.adapter, record.digest)


def is_indexed(record: Record) -> bool:
    """Whether the record takes part in lists and in the view: receipts and reports do not."""
    return not isinstance(record, UploadReceipt | RevisionReport)
