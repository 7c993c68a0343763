"""The unary calls of AdapterService."""

from dataclasses import dataclass

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet_client import adapter_messages as messages
from lorikeet_client.adapters import Adapter, Placement, ResidencyState, Revision
from lorikeet_client.calls import Call, Service
from lorikeet_client.enums import to_number

# A load copies gigabytes and may queue behind others; the server bounds it, this bounds a lost server.
LOAD_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class AdapterPage:
    """A page of a listing; the last one has no next token."""

    items: tuple[Adapter, ...]
    next_page_token: str


def get_upload(adapter: str, request_id: str) -> Call[pb.GetUploadResponse, dict[str, int]]:
    """How many bytes of each file an upload has; of a finished one the manager reads all it stored first."""
    request = pb.GetUploadRequest(adapter=adapter, request_id=request_id)
    return Call(
        Service.ADAPTERS,
        "GetUpload",
        request,
        pb.GetUploadResponse,
        lambda reply: dict(reply.received_bytes),
        timeout_s=LOAD_TIMEOUT_S,
    )


def get_adapter(name: str) -> Call[pb.GetAdapterResponse, Adapter]:
    """One adapter."""
    return Call(
        Service.ADAPTERS,
        "GetAdapter",
        pb.GetAdapterRequest(name=name),
        pb.GetAdapterResponse,
        lambda reply: messages.adapter(reply.adapter),
    )


def list_adapters(
    tenant: str | None, page_size: int, page_token: str
) -> Call[pb.ListAdaptersResponse, AdapterPage]:
    """One page of a tenant's adapters, or of all tenants' for an admin."""
    request = pb.ListAdaptersRequest(
        parent=f"tenants/{tenant}" if tenant else "", page_size=page_size, page_token=page_token
    )
    return Call(
        Service.ADAPTERS,
        "ListAdapters",
        request,
        pb.ListAdaptersResponse,
        lambda reply: AdapterPage(
            tuple(messages.adapter(item) for item in reply.adapters), reply.next_page_token
        ),
    )


def delete_adapter(name: str, etag: str) -> Call[pb.DeleteAdapterResponse, None]:
    """Delete an adapter or a revision. Not repeated by itself: a second try would be NOT_FOUND."""
    request = pb.DeleteAdapterRequest(name=name, etag=etag)
    return Call(
        Service.ADAPTERS,
        "DeleteAdapter",
        request,
        pb.DeleteAdapterResponse,
        lambda _: None,
        idempotent=False,
    )


def pin_adapter(name: str, pinned: bool, etag: str) -> Call[pb.PinAdapterResponse, Adapter]:
    """Keep an adapter active, or no longer. With an etag a second try would be refused as a conflict."""
    request = pb.PinAdapterRequest(name=name, pinned=pinned, etag=etag)
    return Call(
        Service.ADAPTERS,
        "PinAdapter",
        request,
        pb.PinAdapterResponse,
        lambda reply: messages.adapter(reply.adapter),
        idempotent=not etag,
    )


def set_alias(name: str, alias: str, digest: str, etag: str) -> Call[pb.SetAliasResponse, Adapter]:
    """Point an alias at a digest; an empty digest removes it."""
    request = pb.SetAliasRequest(name=name, alias=alias, digest=digest, etag=etag)
    return Call(
        Service.ADAPTERS,
        "SetAlias",
        request,
        pb.SetAliasResponse,
        lambda reply: messages.adapter(reply.adapter),
        idempotent=not etag,
    )


def load_adapter(name: str, tier: ResidencyState) -> Call[pb.LoadAdapterResponse, tuple[Placement, ...]]:
    """Ask for residency now; the reply says where it came true, or why not."""
    request = pb.LoadAdapterRequest(name=name, tier=to_number(tier, pb.ResidencyState, "RESIDENCY_STATE_"))
    return Call(
        Service.ADAPTERS,
        "LoadAdapter",
        request,
        pb.LoadAdapterResponse,
        lambda reply: messages.placements(reply.placements),
        timeout_s=LOAD_TIMEOUT_S,
    )


def unload_adapter(name: str) -> Call[pb.UnloadAdapterResponse, tuple[Placement, ...]]:
    """Free an adapter's memory on the nodes; it stays registered."""
    return Call(
        Service.ADAPTERS,
        "UnloadAdapter",
        pb.UnloadAdapterRequest(name=name),
        pb.UnloadAdapterResponse,
        lambda reply: messages.placements(reply.placements),
        timeout_s=LOAD_TIMEOUT_S,
    )


def probe_adapter(name: str) -> Call[pb.ProbeAdapterResponse, Revision]:
    """Compare with the base model on a node; the revision comes back with its probe."""
    return Call(
        Service.ADAPTERS,
        "ProbeAdapter",
        pb.ProbeAdapterRequest(name=name),
        pb.ProbeAdapterResponse,
        lambda reply: messages.revision(reply.revision),
        timeout_s=LOAD_TIMEOUT_S,
    )


def get_placement(name: str) -> Call[pb.GetPlacementResponse, tuple[Placement, ...]]:
    """Where an adapter is, or all that the caller may see."""
    return Call(
        Service.ADAPTERS,
        "GetPlacement",
        pb.GetPlacementRequest(name=name),
        pb.GetPlacementResponse,
        lambda reply: messages.placements(reply.placements),
    )
