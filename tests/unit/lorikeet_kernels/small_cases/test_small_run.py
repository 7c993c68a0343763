"""Small cases: no kernel is without one, their inputs and references are what they say."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

import lorikeet_kernels
from lorikeet_kernels.small_cases.small_case import SmallCase, SmallProblem, error_of, moved
from lorikeet_kernels.small_run import CASES, main, run_case
from lorikeet_kernels.testing import SiteShape, SlotSite, make_tables

PACKAGE = Path(lorikeet_kernels.__file__).parent
JITTED = ("triton.jit", "gluon.jit")


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts), ast.parse(path.read_text())


def _is_jitted(node: ast.FunctionDef) -> bool:
    made_by = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(ast.unparse(name) in JITTED for name in made_by)


def _launched(tree: ast.Module) -> set[str]:
    """Names in `name[grid](...)`."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {f.value.id for f in calls if isinstance(f, ast.Subscript) and isinstance(f.value, ast.Name)}


def test_every_kernel_has_a_case() -> None:
    """A kernel is what is jitted and named so; what is launched is named so."""
    kernels: set[str] = set()
    launched: set[str] = set()
    jitted: set[str] = set()
    for module, tree in _trees():
        launched |= _launched(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and _is_jitted(node):
                jitted.add(node.name)
                if node.name.endswith("_kernel"):
                    kernels.add(f"{module}.{node.name}")
    assert len(kernels) > 40, "the search finds kernels"
    assert not {name for name in launched & jitted if not name.endswith("_kernel")}
    named = {name for case in CASES for name in case.kernels}
    assert not kernels - named, "without a small case: add one to lorikeet_kernels/small_cases"
    assert not named - kernels, "cases name what is no kernel"


def test_names_are_each_once() -> None:
    """So that --only can pick one."""
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_references_answer(case: SmallCase) -> None:
    """Built on the CPU in the dtype of a GPU: results that are not all zeros, the same every time."""
    first, again = case.build(torch.bfloat16), case.build(torch.bfloat16)
    assert first.expected
    for one, other in zip(first.expected, again.expected, strict=True):
        assert one.device.type == "cpu"
        assert error_of(one, other) == 0.0
        assert one.nan_to_num().any()


def test_errors() -> None:
    """NaN and infinities must lie where they should, integers be equal; else errors are relative."""
    x = torch.tensor([3.0, 4.0, float("nan"), float("-inf")])
    assert error_of(x.clone(), x) == 0.0
    assert error_of(x + torch.tensor([0.5, 0.0, 0.0, 0.0]), x) == pytest.approx(0.1)
    assert error_of(x.nan_to_num(nan=1.0), x) == float("inf")
    assert error_of(x.abs(), x) == float("inf")
    assert error_of(x[:3], x) == float("inf")
    assert error_of(x.double(), x) == float("inf")
    assert error_of(torch.tensor([1, 2, 3]), torch.tensor([1, 5, 4])) == 2.0


def test_moved_copies() -> None:
    """Tensors wherever they are, so that what a launch changes is not what the next one is given."""
    tables = make_tables([SiteShape(8, 8)], [[SlotSite(8)]], dtype=torch.float32)
    same, (number, nothing) = moved((tables, (7, None)), torch.device("cpu"))
    assert (number, nothing) == (7, None)
    assert torch.equal(same.rank, tables.rank)
    same.rank.zero_()
    assert tables.rank.any()


def test_the_command_says_what_it_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 2 without a GPU or without a case; a list needs neither."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "needs a GPU" in capsys.readouterr().err
    assert main(["--only", "no such case"]) == 2
    assert main(["--only", "no such case", "--list"]) == 2
    assert main(["--list", "--only", "pair_lora"]) == 0
    listed = capsys.readouterr().out
    assert "dense_pair" in listed
    assert "rms_norm" not in listed


def _case_of(
    result: torch.Tensor, launched: set[str], *, failure: Exception | None = None
) -> tuple[SmallCase, SmallProblem]:
    """A case of one kernel whose launch leaves its name, and `result` where ones are expected."""

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        if failure is not None:
            raise failure
        launched.add("room.op._op_kernel")
        return (result.to(device),)

    problem = SmallProblem((torch.ones(3),), launch)
    return SmallCase("one", ("room.op._op_kernel",), lambda _: problem), problem


def test_a_line_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong result, a kernel that was not launched, and a launch that fails."""
    launched: set[str] = set()
    cpu = torch.device("cpu")
    assert run_case(*_case_of(torch.ones(3), launched), launched, cpu)
    assert " ok " in capsys.readouterr().out
    assert not run_case(*_case_of(torch.full((3,), 1.1), launched), launched, cpu)
    assert "WRONG" in capsys.readouterr().out
    assert not run_case(*_case_of(torch.ones(3), set()), launched, cpu)
    assert "not launched: room.op._op_kernel" in capsys.readouterr().out
    refused = OutOfResources(300_000, 232_448, "shared memory")
    assert not run_case(*_case_of(torch.ones(3), launched, failure=refused), launched, cpu)
    assert "OutOfResources: out of resource: shared memory" in capsys.readouterr().out


@pytest.mark.long
def test_launches_match_references_under_the_interpreter() -> None:
    """See interpreted_small_cases.py; what a GPU alone can run is left out there."""
    script = Path(__file__).with_name("interpreted_small_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
