"""The requests that this node answers right now, by tenant and id."""

import itertools
from collections.abc import Generator
from contextlib import contextmanager

from inference_service.domain.errors import DuplicateRequestError


class RunningRequests:
    """Gives each request an engine id that is never used twice, and finds it again for Abort."""

    def __init__(self) -> None:
        self._engine_ids: dict[tuple[str, str], str] = {}
        self._numbers = itertools.count(1)

    @contextmanager
    def register(self, tenant: str, request_id: str) -> Generator[str]:
        """Hold an id while the request runs; yields the engine's id for it.

        Raises:
            DuplicateRequestError: the tenant has a running request of that id.
        """
        key = (tenant, request_id)
        if key in self._engine_ids:
            raise DuplicateRequestError(
                f"request_id {request_id!r} is running already; use another, or none",
                metadata={"field": "request_id", "value": request_id},
            )
        # Numbered, because an engine may still be letting go of an earlier request of the same name.
        self._engine_ids[key] = engine_id = f"{tenant}/{request_id}#{next(self._numbers)}"
        try:
            yield engine_id
        finally:
            del self._engine_ids[key]

    def find(self, tenant: str, request_id: str) -> str | None:
        """The engine's id of a running request."""
        return self._engine_ids.get((tenant, request_id))
