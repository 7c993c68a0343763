"""What the repository's tests look at: the files git would carry, less generated code."""

import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


@functools.cache
def carried_files() -> tuple[Path, ...]:
    """Tracked files and new ones that git does not ignore, relative to the root, that are there now."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(path for name in done.stdout.split("\0") if name and (ROOT / (path := Path(name))).is_file())


def is_generated(path: Path) -> bool:
    """Whether protoc wrote it."""
    return path.name.endswith(_GENERATED)


def written_python() -> list[Path]:
    """Python files that people wrote."""
    return [path for path in carried_files() if path.suffix in {".py", ".pyi"} and not is_generated(path)]


def read(path: Path) -> str | None:
    """A carried file's text; None if it is not text."""
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
