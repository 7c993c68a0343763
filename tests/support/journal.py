"""A client's own journal of acknowledged changes, compared with what the stack says afterwards.

A change that was begun and not acknowledged may have happened or not; an acknowledged one must be there.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from lorikeet.adapters.v1 import adapter_pb2, tenant_pb2
from lorikeet_bench import rigs
from lorikeet_rpc.errors import RpcFailure, from_rpc_error
from tests.support.stack import Stack

CONVERGENCE_S = 10.0  # as docs/operations.md promises
PATIENCE_S = 4 * CONVERGENCE_S  # a machine that is so much slower than it should be still passes
DEADLINE_S = 30.0
PROMPT = 5  # the copy base repeats it, so no watermark may be this token


@dataclass
class Entry:
    """What a name may answer with now, and what it may ever have answered with. None: NOT_FOUND."""

    allowed: set[int | None]
    ever: set[int | None] = field(default_factory=set)


class Journal:
    """Changes made through one manager. Names are "tenant/adapter" or "tenant/adapter@alias"."""

    def __init__(self, stack: Stack, root: Path) -> None:
        self.entries: dict[str, Entry] = {}
        self.digests: dict[int, str] = {}  # of each watermark that was acknowledged once
        self.tokens: dict[str, str] = {}  # acknowledged, to their tenant
        self._stack = stack
        self._root = root
        self._adapters = stack.adapters()
        self._tenants = stack.tenants()

    def watermark(self, token: int) -> Path:
        """The directory of the adapter that emits `token`."""
        path = self._root / f"w{token}"
        if not path.exists():
            rigs.write_moe_watermark(path, token)
        return path

    async def upload(
        self, name: str, token: int, parts: Callable[[], Any] | None = None, **header: Any
    ) -> adapter_pb2.UploadResponse:
        """Upload a watermark as the new current revision of a name."""
        async with self._change(name, token):
            if parts is None:
                reply = await self._stack.upload(self.watermark(token), name, **header)
            else:
                reply = await self._adapters.Upload(parts(), metadata=self._stack.auth(), timeout=DEADLINE_S)
        self.digests[token] = reply.revision.digest
        return reply

    async def delete(self, name: str) -> None:
        """Delete an adapter. NOT_FOUND for a repeat whose first try was not acknowledged is an answer too."""
        began_before = name in self.entries and None in self.entries[name].allowed
        async with self._change(name, None):
            try:
                await self._adapters.DeleteAdapter(
                    adapter_pb2.DeleteAdapterRequest(name=_resource(name)),
                    metadata=self._stack.auth(), timeout=DEADLINE_S,
                )  # fmt: skip
            except grpc.aio.AioRpcError as error:
                if not (began_before and error.code() is grpc.StatusCode.NOT_FOUND):
                    raise

    async def set_alias(self, name: str, alias: str, token: int) -> None:
        """Point an alias at an acknowledged watermark's revision."""
        async with self._change(f"{name}@{alias}", token):
            await self._adapters.SetAlias(
                adapter_pb2.SetAliasRequest(name=_resource(name), alias=alias, digest=self.digests[token]),
                metadata=self._stack.auth(), timeout=DEADLINE_S,
            )  # fmt: skip

    async def create_token(self, tenant: str) -> str:
        """Issue a token."""
        reply = await self._tenants.CreateToken(
            tenant_pb2.CreateTokenRequest(parent=f"tenants/{tenant}"),
            metadata=self._stack.auth(), timeout=DEADLINE_S,
        )  # fmt: skip
        self.tokens[reply.token] = tenant
        return reply.token

    async def compare(
        self, names: Sequence[str], nodes: Sequence[Stack], within_s: float = PATIENCE_S
    ) -> tuple[list[str], list[str]]:
        """What is lost and what is wrong, on the manager and on every node, once `within_s` is over.

        Lost: an acknowledged change is not there. Wrong: an answer that no revision of that name ever gave.
        """
        deadline_s = time.monotonic() + within_s
        while True:
            lost, wrong = list[str](), list[str]()
            for name in names:
                for where, answer in await self._answers(name, nodes):
                    entry = self.entries[name]
                    if answer not in entry.allowed:
                        (lost if answer in entry.ever else wrong).append(
                            f"{name} on {where}: {answer}, acknowledged {entry.allowed}"
                        )
            if wrong or not lost or time.monotonic() > deadline_s:
                return lost, wrong
            await asyncio.sleep(0.1)

    async def missing_tokens(self, tokens: Sequence[str], nodes: Sequence[Stack]) -> list[str]:
        """Acknowledged tokens that the manager or a node does not take within the interval."""
        lost = list[str]()
        for index, token in enumerate(tokens):
            request = adapter_pb2.ListAdaptersRequest(parent=f"tenants/{self.tokens[token]}")
            try:
                await self._adapters.ListAdapters(
                    request, metadata=self._stack.auth(token), timeout=DEADLINE_S
                )
            except grpc.aio.AioRpcError as error:
                lost.append(f"token {index} on the manager: {error.code()}")
            for node in nodes:
                if not await _becomes_true(lambda n=node, t=token: _is_let_in(n, t)):
                    lost.append(f"token {index} on {node.node_address}")
        return lost

    @asynccontextmanager
    async def _change(self, name: str, token: int | None) -> Any:
        entry = self.entries.setdefault(name, Entry({None}, {None}))
        entry.allowed.add(token)
        entry.ever.add(token)
        yield
        entry.allowed = {token}

    async def _answers(self, name: str, nodes: Sequence[Stack]) -> list[tuple[str, int | None]]:
        """What the manager's record says that the name answers with, and what each node answers."""
        found = [("manager", await self._recorded(name))]
        found += [(n.node_address, await answered(n, name)) for n in nodes]
        return found

    async def _recorded(self, name: str) -> int | None:
        adapter, _, alias = name.partition("@")
        try:
            reply = await self._adapters.GetAdapter(
                adapter_pb2.GetAdapterRequest(name=_resource(adapter)),
                metadata=self._stack.auth(), timeout=DEADLINE_S,
            )  # fmt: skip
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            raise
        found = reply.adapter
        digest = found.aliases.get(alias, "") if alias else found.current_digest
        if not digest:
            return None
        return next((t for t, d in self.digests.items() if d == digest), -1)


async def answered(node: Stack, name: str) -> int | None:
    """The watermark that a name answers with on a node; None: NOT_FOUND; -1: not one watermark."""
    try:
        done = await node.generate([PROMPT], adapter=name, max_tokens=3)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return None
        raise
    return done.token_ids[0] if len(done.token_ids) == 3 and len(set(done.token_ids)) == 1 else -1


async def until_acknowledged(
    change: Callable[[], Awaitable[Any]], timeout_s: float = 60.0
) -> list[RpcFailure]:
    """Repeat a change until it is acknowledged, as a client does on UNAVAILABLE; returns the refusals."""
    refusals = list[RpcFailure]()
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            await change()
        except grpc.RpcError as error:
            refusals.append(from_rpc_error(error))
            check_refusal(refusals[-1])
            assert time.monotonic() < deadline_s, f"not acknowledged after {timeout_s} s: {refusals[-1]}"
            await asyncio.sleep(min(0.2, refusals[-1].retry_after_s or 0.2))
        else:
            return refusals


def check_refusal(failure: RpcFailure) -> None:
    """A refused write says UNAVAILABLE (or ABORTED where others were faster) and when to try again."""
    assert failure.code in {"UNAVAILABLE", "ABORTED"}, failure
    assert failure.retry_after_s, f"no RetryInfo: {failure} {failure.reason}"


async def _is_let_in(node: Stack, token: str) -> bool:
    try:
        await node.generate([PROMPT], token=token, max_tokens=1)
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED, error
        return False
    return True


async def _becomes_true(condition: Callable[[], Awaitable[bool]]) -> bool:
    deadline_s = time.monotonic() + PATIENCE_S
    while not await condition():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(0.1)
    return True


def _resource(name: str) -> str:
    tenant, _, adapter = name.partition("/")
    return f"tenants/{tenant}/adapters/{adapter}"
