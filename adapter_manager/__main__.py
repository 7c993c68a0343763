"""`python -m adapter_manager`, also installed as lorikeet-adapter-manager."""

import sys

from adapter_manager.infra.data_directory import DataDirectoryInUseError
from adapter_manager.server import serve
from adapter_manager.settings import read_settings
from lorikeet_rpc.service_program import run_service


def main() -> int:
    """Run until a signal; exit codes as `run_service` has them."""
    return run_service("lorikeet-adapter-manager", read_settings, serve, expected=(DataDirectoryInUseError,))


if __name__ == "__main__":
    sys.exit(main())
