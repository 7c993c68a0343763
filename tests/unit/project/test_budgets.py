"""Length budgets: files and functions stay readable in one sitting."""

import ast
import statistics

from tests.unit.project.repository import read, written_python

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_MEDIAN_LINES = 120


def test_no_file_is_too_long() -> None:
    """A file that needs a table of contents is two files. Tests too."""
    lengths = {path: len((read(path) or "").splitlines()) for path in written_python()}
    assert not {str(path): lines for path, lines in lengths.items() if lines > MAX_FILE_LINES}
    product = [lines for path, lines in lengths.items() if path.parts[0] != "tests" and lines]
    assert statistics.median(product) <= MAX_MEDIAN_LINES


def test_no_function_is_too_long() -> None:
    """From its docstring to its last line."""
    found: dict[str, int] = {}
    for path in written_python():
        for node in ast.walk(ast.parse(read(path) or "")):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                # From the first statement: a launch or a command may declare many parameters, one a line.
                lines = (node.end_lineno or 0) - node.body[0].lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found[f"{path}:{node.lineno} {node.name}"] = lines
    assert not found


def test_file_names_say_what_they_hold() -> None:
    """Names that say nothing collect everything."""
    empty_words = {"utils", "util", "helpers", "helper", "common", "misc", "base"}
    assert not [str(path) for path in written_python() if path.stem in empty_words]
