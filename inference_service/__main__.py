"""`python -m inference_service`, also installed as lorikeet-inference."""

import asyncio
import sys

import structlog
import uvloop

from inference_service.server import serve
from inference_service.settings import read_settings
from lorikeet_contract.status import ServiceError
from lorikeet_rpc.freed_memory import return_freed_memory
from lorikeet_rpc.logs import configure_logging
from lorikeet_rpc.server import ListenError
from lorikeet_rpc.service_settings import InvalidSettingsError

log = structlog.get_logger()


def main() -> int:
    """Run until a signal. Exit code 0 after a clean stop, 1 if it could not start, 2 for wrong settings."""
    return_freed_memory()
    try:
        settings = read_settings(sys.argv[1:])
    except InvalidSettingsError as error:
        sys.stderr.write(f"lorikeet-inference: {error}\n")
        return 2
    configure_logging(json=settings.log_format == "json", level=settings.log_level)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except (ListenError, ServiceError, ValueError, OSError) as error:
        log.error("server.start_failed", error=str(error))  # noqa: TRY400 (its message is what the operator needs)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
