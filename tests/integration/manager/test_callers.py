"""What each caller of the manager may see, and names that mean harm."""

import asyncio
import json

import pytest

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet.adapters.v1 import tenant_pb2
from tests.support.manager_process import (
    ADAPTERS,
    FIXTURES,
    Managed,
    failure_of,
    revision_files,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")
BAD_NAMES = json.loads((FIXTURES / "adapters_bad" / "bad_names.json").read_text())["names"]


async def test_tenants_are_kept_apart(stack: Managed) -> None:
    """Another tenant's names are NOT_FOUND in every call, and tenants cannot manage tenants."""
    manager, _ = stack
    other = await manager.tenant("other")
    mine = await manager.upload(ADAPTERS / "attn-r8", "demo/a")
    theirs = await manager.upload(ADAPTERS / "attn-r8", "other/a", token=other)
    assert mine.created
    assert theirs.created
    assert len(revision_files(manager)) == 1
    for method, request in (
        ("GetAdapter", pb.GetAdapterRequest(name="demo/a")),
        ("DeleteAdapter", pb.DeleteAdapterRequest(name="demo/a")),
        ("PinAdapter", pb.PinAdapterRequest(name="demo/a", pinned=True)),
        ("SetAlias", pb.SetAliasRequest(name="demo/a", alias="x", digest=mine.revision.digest)),
        ("LoadAdapter", pb.LoadAdapterRequest(name="demo/a")),
        ("UnloadAdapter", pb.UnloadAdapterRequest(name="demo/a")),
        ("GetPlacement", pb.GetPlacementRequest(name="demo/a")),
        ("GetUpload", pb.GetUploadRequest(adapter="demo/a", request_id="r")),
        ("ListAdapters", pb.ListAdaptersRequest(parent="tenants/demo")),
    ):
        failure = await failure_of(manager.call(method, request, token=other))
        assert failure.code == "NOT_FOUND", method
    assert (await failure_of(manager.upload(ADAPTERS / "attn-r8", "demo/b", token=other))).code == "NOT_FOUND"
    assert await manager.names(other) == {"tenants/other/adapters/a": theirs.revision.digest}
    assert len(await manager.names()) == 2  # the bootstrap token is an admin's
    failure = await failure_of(manager.call("ListTenants", tenant_pb2.ListTenantsRequest(), token=other))
    assert failure.code == "PERMISSION_DENIED"
    failure = await failure_of(manager.call("ListAdapters", pb.ListAdaptersRequest(), token="lk_wrong"))
    assert failure.code == "UNAUTHENTICATED"


@pytest.mark.parametrize("method", ["GetAdapter", "Upload"])
async def test_hostile_names_get_a_client_error(stack: Managed, method: str) -> None:
    """Never INTERNAL, and nothing is written outside the data directory."""
    manager, _ = stack
    before = set(manager.data_dir.parent.iterdir())
    for name in BAD_NAMES:
        if method == "Upload":
            parts = iter([pb.UploadRequest(header=pb.UploadHeader(adapter=name))])
            failure = await failure_of(asyncio.to_thread(manager._blocking, "Upload", parts, None, 20))
        else:
            failure = await failure_of(manager.call("GetAdapter", pb.GetAdapterRequest(name=name)))
        assert failure.code in {"INVALID_ARGUMENT", "NOT_FOUND"}, name
        assert "\n" not in failure.message
    assert set(manager.data_dir.parent.iterdir()) == before
