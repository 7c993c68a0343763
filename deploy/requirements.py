"""Print the project's dependencies from pyproject.toml, for a layer of an image; `--without` leaves one out.

python deploy/requirements.py --without torch --without triton > requirements.txt
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9._-]+")


def requirements(pyproject: Path, without: list[str]) -> list[str]:
    """The dependencies as they stand in the file, less those named.

    Raises:
        ValueError: a name to leave out that is none of them.
    """
    listed = tomllib.loads(pyproject.read_text())["project"]["dependencies"]
    by_name = {match[0].lower(): line for line in listed if (match := _NAME.match(line))}
    if unknown := [name for name in without if name.lower() not in by_name]:
        raise ValueError(f"{pyproject} does not depend on {', '.join(unknown)}")
    left_out = {name.lower() for name in without}
    return [line for name, line in by_name.items() if name not in left_out]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Print the project's dependencies.")
    parser.add_argument("--without", action="append", default=[], metavar="NAME")
    parser.add_argument("--pyproject", type=Path, default=Path("pyproject.toml"))
    options = parser.parse_args()
    sys.stdout.write("\n".join(requirements(options.pyproject, options.without)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
