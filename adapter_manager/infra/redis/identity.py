"""Which registry this manager follows: the store's epoch, remembered in the data directory over restarts.

A store that answers with nothing, or with somebody else's registry, must never pass for this one: nodes would
unload everything because an empty store answered.
"""

import os
from pathlib import Path

import structlog

from adapter_manager.domain.errors import (
    RegistryBehindError,
    RegistryReplacedError,
    RegistryUnavailableError,
)

log = structlog.get_logger(__name__)


class RegistryIdentity:
    """The one epoch that is followed; empty until a registry was found or made for the first time.

    Args:
        path: where it is kept; None: only in memory, which a restart forgets.
        is_adopting: forget what was kept, so that the store's registry is followed whatever it is.
    """

    def __init__(self, path: Path | None = None, *, is_adopting: bool = False) -> None:
        self._path = path
        self._complaint = ""
        self.epoch = ""
        if path is not None and path.exists() and not is_adopting:
            self.epoch = path.read_text().strip()

    def check(self, found: str, *, is_read: bool) -> None:
        """Take the epoch that came with an answer of the store; the first one found is followed from then on.

        Args:
            found: the store's epoch; empty where it holds no registry.
            is_read: whether this process has read the registry, and so can give it back.

        Raises:
            RegistryBehindError: the store holds nothing, and what was read can be written back.
            RegistryReplacedError: it holds nothing or another registry; only an operator can tell why.
        """
        if found and not self.epoch:
            self.follow(found)
        if found == self.epoch:
            self._complaint = ""
            return
        if not found and is_read:
            raise RegistryBehindError(
                "the registry's store holds nothing; it is being given back what was in it, try again",
                retry_after_s=1,
            )
        message = (
            f"the registry's store holds {f'another registry ({found})' if found else 'nothing'}, but this "
            f"manager follows registry {self.epoch}; nothing is changed until the store is right again. "
            "Restore its data, or start the manager once with --adopt-registry to follow what is there"
        )
        if message != self._complaint:
            self._complaint = message
            log.error("redis.other_registry", error=message)
        raise RegistryReplacedError(message, metadata={"expected": self.epoch}, retry_after_s=5)

    def follow(self, epoch: str) -> None:
        """Follow this registry from now on, also after a restart.

        Raises:
            RegistryUnavailableError: the data directory does not take it.
        """
        if self._path is not None:
            part = self._path.with_suffix(".part")
            try:
                with part.open("w") as file:
                    file.write(f"{epoch}\n")
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(self._path)
            except OSError as error:
                raise RegistryUnavailableError(
                    f"the data directory does not keep which registry is followed: {error.strerror}",
                    retry_after_s=30,
                ) from error
        self.epoch = epoch
