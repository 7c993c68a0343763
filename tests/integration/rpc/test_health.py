"""Health and reflection, which need no token."""

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from lorikeet_rpc.channel import open_channel
from tests.support.echo_server import SERVICE, echo_rig


async def test_health_and_reflection_need_no_token() -> None:
    """Health of the whole, of the service and of nothing; reflection lists the service."""
    async with echo_rig() as rig, open_channel(rig.target, aio=True) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError):
            await health.Check(health_pb2.HealthCheckRequest(service="no.Such"))
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        names = {s.name async for reply in listing for s in reply.list_services_response.service}
    assert SERVICE in names


async def test_every_health_watcher_hears_of_a_change() -> None:
    """Also those that stay after another has left; a service that is not here is unknown."""
    async with echo_rig() as rig, open_channel(rig.target, aio=True) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        gone, stays = (stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE)) for _ in range(2))
        other = stub.Watch(health_pb2.HealthCheckRequest(service="no.Such"))
        status = health_pb2.HealthCheckResponse
        assert {(await w.read()).status for w in (gone, stays)} == {status.SERVING}
        assert (await other.read()).status == status.SERVICE_UNKNOWN
        gone.cancel()
        await asyncio.sleep(0.1)
        await rig.server.set_serving(serving=False)
        assert (await stays.read()).status == status.NOT_SERVING
