"""`python -m inference_service`, also installed as lorikeet-inference."""

import os
import sys

# Read by gRPC as it is imported. With uvloop a child is forked before its program begins, and gRPC's handlers
# of forks, of no use to it, crashed some of them there (status -11): checkers of grammars, engines.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import uvloop

from inference_service.server import serve
from inference_service.settings import read_settings
from lorikeet_rpc.service_program import run_service


def main() -> int:
    """Run until a signal; exit codes as `run_service` has them."""
    return run_service("lorikeet-inference", read_settings, serve, loop_factory=uvloop.new_event_loop)


if __name__ == "__main__":
    sys.exit(main())
