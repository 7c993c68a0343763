"""`python -m adapter_manager`: read the settings, configure the log, serve."""

import sys

from adapter_manager.domain.errors import RegistryUnavailableError
from adapter_manager.infra.data_directory import DataDirectoryInUseError
from adapter_manager.server import run
from adapter_manager.settings import Settings
from lorikeet_rpc.logs import configure_logging
from lorikeet_rpc.server import ListenError


def main() -> None:
    """Serve until a signal; exit code 0 after an orderly stop, 1 where the start was impossible."""
    settings = Settings()  # pyright: ignore[reportCallIssue] (pydantic fills it)
    configure_logging(json=settings.log_format == "json", level=settings.log_level)
    try:
        run(settings)
    except (DataDirectoryInUseError, ListenError, RegistryUnavailableError) as error:
        print(f"adapter_manager: {error}", file=sys.stderr)  # noqa: T201 (a person started this)
        sys.exit(1)


if __name__ == "__main__":
    main()
