"""`lorikeet` and `python -m lorikeet_admin`."""

import os
import sys

from lorikeet_admin.app import app
from lorikeet_admin.exits import ExitCode


def main() -> None:
    """Run the command line; ends the process."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader (head, less) has left. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.FAILED)


if __name__ == "__main__":
    main()
