"""A local stack whose two metrics endpoints are on."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.scrapes import Scrape, scrape
from tests.support.stack import Stack, free_port


class MeteredStack(Stack):
    """See Stack."""

    def __init__(
        self,
        model_dir: Path,
        root: Path,
        *,
        node_flags: Sequence[str] = (),
        manager_flags: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.node_metrics = f"127.0.0.1:{free_port()}"
        self.manager_metrics = f"127.0.0.1:{free_port()}"
        super().__init__(
            model_dir,
            root,
            node_flags=(*node_flags, "--metrics-listen", self.node_metrics),
            manager_flags=(*manager_flags, "--metrics-listen", self.manager_metrics),
            **options,
        )

    async def node_scrape(self, accept: str | None = None) -> Scrape:
        """The inference service's series, as of this call or later however busy the machine is."""
        return await _fresh(self.node_metrics, accept, "lorikeet_engine_report_age_seconds")

    async def manager_scrape(self, accept: str | None = None) -> Scrape:
        """The adapter manager's series, likewise."""
        return await _fresh(self.manager_metrics, accept, "lorikeet_manager_report_age_seconds")

    async def node_shows(self, check: Callable[[Scrape], object], timeout_s: float = 30.0) -> Scrape:
        """Scrape the node until `check` holds."""
        return await _until(self.node_metrics, check, timeout_s)

    async def manager_shows(self, check: Callable[[Scrape], object], timeout_s: float = 30.0) -> Scrape:
        """Scrape the manager until `check` holds."""
        return await _until(self.manager_metrics, check, timeout_s)


async def _fresh(address: str, accept: str | None, age: str) -> Scrape:
    begun_s = time.monotonic()
    while True:
        found = await asyncio.to_thread(scrape, address, accept)
        passed_s = time.monotonic() - begun_s
        if found.value(age) <= passed_s:
            return found
        assert passed_s < 60, found.text


async def _until(address: str, check: Callable[[Scrape], object], timeout_s: float) -> Scrape:
    end = time.monotonic() + timeout_s
    while True:
        found = await asyncio.to_thread(scrape, address)
        if check(found):
            return found
        assert time.monotonic() < end, found.text
        await asyncio.sleep(0.05)
