"""The base models that nodes serve: kept in the registry, so that uploads work with every node away."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import structlog

from adapter_manager.application.mirror import RegistryMirror
from adapter_manager.application.transactions import Transactions
from adapter_manager.domain.errors import BaseMismatchError, BaseModelUnknownError, RegistryUnavailableError
from adapter_manager.domain.node import BaseModel
from adapter_manager.ports import Change, Clock, Registry, overwrite

log = structlog.get_logger(__name__)


class ModelDirectory:
    """What uploads are checked against."""

    def __init__(
        self, registry: Registry, mirror: RegistryMirror, transactions: Transactions, clock: Clock
    ) -> None:
        self._registry = registry
        self._mirror = mirror
        self._transactions = transactions
        self._clock = clock
        self._recording = asyncio.Lock()
        # Seen by this process, newest last; the registry may be away when a node is met.
        self._seen: dict[str, BaseModel] = {}

    async def seen(self, model: BaseModel) -> None:
        """A node serves this model; kept once the registry can be reached, whoever asks again."""
        first = model.base_digest not in self._seen
        if first:
            self._seen[model.base_digest] = replace(model, last_seen_s=self._clock())
        known = self._mirror.view.models.get(model.base_digest)
        if not first and known and replace(known, last_seen_s=0.0) == replace(model, last_seen_s=0.0):
            return
        if not self._mirror.view.epoch:
            return

        async def attempt() -> tuple[Sequence[Change], None]:
            return [overwrite(replace(model, last_seen_s=self._clock()))], None

        async with self._recording:
            try:
                await self._transactions.run(attempt)
            except RegistryUnavailableError:
                self._seen.pop(model.base_digest, None)  # once more at the next look
                return
        log.info("model.registered", model=model.name, base_digest=model.base_digest)

    def current(self, base_digest: str = "") -> BaseModel:
        """The model of that digest; without one the one seen last.

        Raises:
            BaseModelUnknownError: no node was ever seen.
            BaseMismatchError: none of that digest was.
        """
        known = dict(self._mirror.view.models) | self._seen
        if not known:
            raise BaseModelUnknownError(
                "no inference node has told its model yet, so there is nothing to check an adapter against; "
                "start the inference service and see that --nodes names it, then upload again"
            )
        if base_digest:
            if base_digest not in known:
                raise BaseMismatchError.of(base_digest, known)
            return known[base_digest]
        return max(known.values(), key=lambda m: m.last_seen_s)
