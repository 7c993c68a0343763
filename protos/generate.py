"""Makes the checked-in Python code from the .proto files: `python protos/generate.py [--check]`.

The generator is pinned to grpcio-tools 1.81.1, which stamps protobuf 6.33.5 and grpcio 1.81.1: generated code
refuses a runtime older than its stamp and loads on newer ones, so the pin is the oldest runtime we support.
`--check` regenerates into a temporary folder and fails on any difference.
"""

import argparse
import filecmp
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PINNED = "1.81.1"


def generate(out: Path) -> None:
    """Write the code of every .proto below ROOT to `out`, mirroring the folders."""
    found = version("grpcio-tools")
    if found != PINNED:
        sys.exit(f"grpcio-tools is {found}, not {PINNED}: run `pip install grpcio-tools=={PINNED}`")
    include = Path(sysconfig.get_path("purelib")) / "grpc_tools" / "_proto"
    scripts = Path(sysconfig.get_path("scripts"))
    command = [
        sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", f"-I{include}",
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
        f"--python_out={out}", f"--mypy_out={out}",
    ]  # fmt: skip
    protos = sorted(ROOT.glob("lorikeet/**/*.proto"))
    services = [p for p in protos if p.stem.endswith("_service")]
    _run([*command, *map(str, protos)])
    # Service files only: elsewhere protoc would leave empty _grpc modules behind.
    _run([*command, f"--grpc_python_out={out}", f"--mypy_grpc_out={out}", *map(str, services)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def generated_files(root: Path) -> set[Path]:
    """Paths of generated modules and stubs, relative to `root`."""
    return {p.relative_to(root) for pattern in ("*_pb2*.py", "*_pb2*.pyi") for p in root.rglob(pattern)}


def differences() -> list[str]:
    """Names of checked-in files that differ from what the protos generate now."""
    with tempfile.TemporaryDirectory() as tmp:
        fresh = Path(tmp)
        generate(fresh)
        names = generated_files(ROOT) | generated_files(fresh)
        return sorted(
            str(n)
            for n in names
            if not (ROOT / n).exists()
            or not (fresh / n).exists()
            or not filecmp.cmp(ROOT / n, fresh / n, shallow=False)
        )


def main() -> None:
    """Generate, or with --check compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with what is checked in")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    if stale := differences():
        sys.exit("generated code is stale; run `make protos`:\n  " + "\n  ".join(stale))
    print("generated code is current")


if __name__ == "__main__":
    main()
