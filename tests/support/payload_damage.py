"""Ways in which a revision's files come to harm, and their undoing."""

import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MANIFEST, PAYLOAD = "manifest.json", "payload"


@dataclass(frozen=True)
class Damage:
    """`harm` gets the revision's directory and that of another adapter of the same size."""

    name: str
    harm: Callable[[Path, Path], object]

    def __str__(self) -> str:
        return self.name

    @contextmanager
    def done_to(self, directory: Path, other: Path) -> Generator[None]:
        """Inside, the files are harmed; afterwards they are as before."""
        kept = directory.with_name(f"{directory.name}.kept")
        shutil.copytree(directory, kept)
        try:
            self.harm(directory, other)
            yield
        finally:
            _clear(directory)
            kept.rename(directory)


def _flip(name: str, place: float) -> Callable[[Path, Path], object]:
    """One bit, at a share of the file's length."""

    def harm(directory: Path, _: Path) -> None:
        data = bytearray((directory / name).read_bytes())
        data[round(place * (len(data) - 1))] ^= 4
        (directory / name).write_bytes(data)

    return harm


def _cut(name: str, keep: float) -> Callable[[Path, Path], object]:
    """To a share of its length, one byte less at least."""

    def harm(directory: Path, _: Path) -> None:
        data = (directory / name).read_bytes()
        (directory / name).write_bytes(data[: min(round(keep * len(data)), len(data) - 1)])

    return harm


def _replace(name: str) -> Callable[[Path, Path], object]:
    """By the other adapter's file."""

    def harm(directory: Path, other: Path) -> None:
        size = (directory / name).stat().st_size
        shutil.copyfile(other / name, directory / name)
        assert (directory / name).stat().st_size == size

    return harm


def _make_folder(name: str) -> Callable[[Path, Path], object]:
    """In place of the file: to open it fails, as without permission."""

    def harm(directory: Path, _: Path) -> None:
        (directory / name).unlink()
        (directory / name / "inner").mkdir(parents=True)

    return harm


def _delete(name: str) -> Callable[[Path, Path], object]:
    return lambda directory, _: _clear(directory / name)


def _append(name: str) -> Callable[[Path, Path], object]:
    return lambda directory, _: (directory / name).write_bytes((directory / name).read_bytes() + b"\n")


def _clear(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# Every flip is one row's kind but another layer, tensor or end of the payload.
DAMAGES = (
    *(Damage(f"payload: a bit flipped at {at:.0%}", _flip(PAYLOAD, at)) for at in (0, 0.3, 0.7, 1)),
    Damage("payload: the last byte cut off", _cut(PAYLOAD, 1)),
    Damage("payload: empty", _cut(PAYLOAD, 0)),
    Damage("payload: a byte too many", _append(PAYLOAD)),
    Damage("payload: another adapter's, of equal size", _replace(PAYLOAD)),
    Damage("payload: deleted", _delete(PAYLOAD)),
    Damage("payload: a folder", _make_folder(PAYLOAD)),
    Damage("manifest: a bit flipped", _flip(MANIFEST, 0.5)),
    Damage("manifest: cut in half", _cut(MANIFEST, 0.5)),
    Damage("manifest: a byte too many", _append(MANIFEST)),
    Damage("manifest: another adapter's", _replace(MANIFEST)),
    Damage("manifest: deleted", _delete(MANIFEST)),
    Damage("manifest: a folder", _make_folder(MANIFEST)),
    Damage(
        "both: another adapter's, whole", lambda d, o: (_replace(PAYLOAD)(d, o), _replace(MANIFEST)(d, o))
    ),
    Damage("both: deleted", _delete("")),
)
