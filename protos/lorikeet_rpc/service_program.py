"""What both services' programs do around their `serve`: settings, logging, an exit code for each end."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import structlog

from lorikeet_contract.status import ServiceError
from lorikeet_rpc.freed_memory import return_freed_memory
from lorikeet_rpc.logs import configure_logging
from lorikeet_rpc.server import ListenError
from lorikeet_rpc.service_settings import InvalidSettingsError

log = structlog.get_logger()


class LogSettings(Protocol):
    """What every service's settings have."""

    @property
    def log_format(self) -> str:
        """The form of the log lines: json or console."""
        ...

    @property
    def log_level(self) -> str:
        """The least level to log."""
        ...


SettingsT = TypeVar("SettingsT", bound=LogSettings)


def run_service(
    name: str,
    read_settings: Callable[[list[str]], SettingsT],
    serve: Callable[[SettingsT], Coroutine[Any, Any, None]],
    *,
    expected: tuple[type[Exception], ...] = (),
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Run until a signal. Exit code 0 after a clean stop, 1 if it could not start, 2 for wrong settings.

    Args:
        name: what the program is called, for a message about its settings.
        read_settings: flags to settings.
        serve: returns after a clean stop.
        expected: further errors whose message is all that an operator needs.
        loop_factory: makes the event loop; asyncio's own without it.
    """
    return_freed_memory()
    try:
        settings = read_settings(sys.argv[1:])
    except InvalidSettingsError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 2
    configure_logging(json=settings.log_format == "json", level=settings.log_level)
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(serve(settings))
    except (ListenError, ServiceError, ValueError, OSError, *expected) as error:
        # Its message is what the operator needs; a traceback would hide it.
        log.error("server.start_failed", error=str(error))  # noqa: TRY400
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
