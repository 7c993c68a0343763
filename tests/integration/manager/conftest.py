"""One manager with one fake node for all tests that leave it running; each test finds it empty."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from lorikeet.adapters.v1 import adapter_pb2 as pb
from lorikeet.adapters.v1 import tenant_pb2
from tests.support.manager_process import Managed, managed, until_done
from tests.support.waiting import eventually


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Managed]:
    """A manager whose one node is connected."""
    async with managed(tmp_path_factory.mktemp("manager")) as (manager, nodes):
        await eventually(lambda: nodes[0].syncs, 10)
        yield manager, nodes


@pytest_asyncio.fixture(loop_scope="session")
async def stack(shared_stack: Managed) -> AsyncIterator[Managed]:
    """The shared one; adapters and tenants that the test made are deleted after it."""
    manager, (node,) = shared_stack
    yield shared_stack
    for name in await manager.names():
        request = pb.DeleteAdapterRequest(name=name)
        await until_done(lambda request=request: manager.call("DeleteAdapter", request))
    tenants = await manager.call("ListTenants", tenant_pb2.ListTenantsRequest())
    for tenant in tenants.tenants:
        if tenant.name != "tenants/demo":
            await manager.call("DeleteTenant", tenant_pb2.DeleteTenantRequest(name=tenant.name))
    await eventually(lambda: not node.names(), 10)
