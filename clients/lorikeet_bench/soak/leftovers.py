"""Adapters that a soak made and did not come to delete."""

import asyncio
import re

from lorikeet_client import Adapter, AsyncLorikeet, LorikeetError

# As the roster names its members.
_NAME = re.compile(r".*/soak-\d\d")
_CONCURRENT = 8
_CALL_S = 10.0
_LONGEST_S = 30.0


async def delete_leftovers(client: AsyncLorikeet, tenant: str) -> str:
    """Delete the tenant's adapters that are named as a soak names them.

    Returns:
        Why some may be left; empty if none is.
    """
    try:
        async with asyncio.timeout(_LONGEST_S):
            found = [adapter async for adapter in client.list_adapters(tenant)]
            limit = asyncio.Semaphore(_CONCURRENT)
            deleting = [_delete(client, adapter, limit) for adapter in found if _NAME.fullmatch(adapter.name)]
            outcomes = await asyncio.gather(*deleting, return_exceptions=True)
    except (LorikeetError, TimeoutError) as error:
        return str(error) or f"it took longer than {_LONGEST_S:g} s"
    return next((str(outcome) for outcome in outcomes if isinstance(outcome, Exception)), "")


async def _delete(client: AsyncLorikeet, adapter: Adapter, limit: asyncio.Semaphore) -> None:
    async with limit:
        if adapter.pinned:
            await client.pin_adapter(adapter.name, pinned=False, timeout_s=_CALL_S)
        await client.delete_adapter(adapter.name, timeout_s=_CALL_S)
