"""Imports run one way, packages show what they say they show, and source roots are no packages."""

import ast
import importlib
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.unit.project.repository import ROOT, carried_files, read, written_python

SOURCE_ROOTS = ("kernels", "protos", "clients")
PACKAGES = (
    "adapter_manager",
    "inference_service",
    "lorikeet_admin",
    "lorikeet_bench",
    "lorikeet_client",
    "lorikeet_contract",
    "lorikeet_kernels",
    "lorikeet_rpc",
)


def test_import_contracts() -> None:
    """The contracts in pyproject hold."""
    lint = Path(sysconfig.get_path("scripts")) / "lint-imports"
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def faces() -> list[str]:
    """Modules whose __init__.py has an __all__."""
    found: list[str] = []
    for path in written_python():
        if path.name != "__init__.py" or "__all__" not in (read(path) or ""):
            continue
        parts = path.parent.parts[1:] if path.parts[0] in SOURCE_ROOTS else path.parent.parts
        if parts and parts[0] in PACKAGES:
            found.append(".".join(parts))
    return sorted(found)


@pytest.mark.parametrize("name", faces())
def test_all_is_the_public_face(name: str) -> None:
    """`__all__` names exactly what the package's own __init__ imports or defines, and it is all there."""
    module = importlib.import_module(name)
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    bound: set[str] = set()
    for node in tree.body:
        match node:
            case ast.ImportFrom(names=names) | ast.Import(names=names):
                bound |= {alias.asname or alias.name for alias in names}
            case (
                ast.FunctionDef(name=defined)
                | ast.ClassDef(name=defined)
                | ast.AsyncFunctionDef(name=defined)
            ):
                bound.add(defined)
            case _:
                pass
    public = {item for item in bound if not item.startswith("_")}
    assert set(module.__all__) == public
    assert len(module.__all__) == len(set(module.__all__))
    assert not [item for item in module.__all__ if not hasattr(module, item)]


def test_the_client_has_a_face() -> None:
    """The check above must not pass for want of packages to look at."""
    assert "lorikeet_client" in faces()


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_source_roots_are_no_packages(root: str) -> None:
    """A top-level import named `kernels` breaks other packages that look for one of that name."""
    assert Path(root, "__init__.py") not in carried_files()


def test_no_type_checking_blocks_and_no_local_imports_of_our_own() -> None:
    """Wanting one means that a type lives too high."""
    ours = (*PACKAGES, "lorikeet")
    found: list[str] = []
    for path in written_python():
        if path.parts[0] in {"tests", "examples", "benchmarks"}:
            continue
        tree = ast.parse(read(path) or "")
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == "TYPE_CHECKING":
                found.append(f"{path}:{node.lineno} TYPE_CHECKING")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found += [
                    f"{path}:{inner.lineno} import inside {node.name}"
                    for inner in ast.walk(node)
                    if (isinstance(inner, ast.ImportFrom) and (inner.module or "").split(".")[0] in ours)
                    or (
                        isinstance(inner, ast.Import)
                        and any(a.name.split(".")[0] in ours for a in inner.names)
                    )
                ]
    assert not found
