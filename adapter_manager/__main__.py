"""`python -m adapter_manager`, also installed as lorikeet-adapter-manager."""

import asyncio
import sys

import structlog

from adapter_manager.infra.data_directory import DataDirectoryInUseError
from adapter_manager.server import serve
from adapter_manager.settings import read_settings
from lorikeet_contract.status import ServiceError
from lorikeet_rpc.freed_memory import return_freed_memory
from lorikeet_rpc.logs import configure_logging
from lorikeet_rpc.server import ListenError
from lorikeet_rpc.service_settings import InvalidSettingsError

log = structlog.get_logger(__name__)


def main() -> int:
    """Run until a signal. Exit code 0 after a clean stop, 1 if it could not start, 2 for wrong settings."""
    return_freed_memory()
    try:
        settings = read_settings(sys.argv[1:])
    except InvalidSettingsError as error:
        sys.stderr.write(f"lorikeet-adapter-manager: {error}\n")
        return 2
    configure_logging(json=settings.log_format == "json", level=settings.log_level)
    try:
        asyncio.run(serve(settings))
    except (DataDirectoryInUseError, ListenError, ServiceError, ValueError, OSError) as error:
        # Its message is what the operator needs; a traceback would hide it.
        log.error("server.start_failed", error=str(error))  # noqa: TRY400
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
