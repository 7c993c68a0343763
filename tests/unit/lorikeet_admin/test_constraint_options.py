"""`lorikeet generate` with structured output: from files, from stdin, from options."""

from pathlib import Path

import pytest

from lorikeet.inference.v1 import generation_pb2 as pb
from tests.support.command_line import Run
from tests.support.fake_services import FakeServices

SCHEMA = '{"type": "null"}'


def test_every_kind(run: Run, fakes: FakeServices, tmp_path: Path) -> None:
    """Files are read as they are; a dash is stdin."""
    file = tmp_path / "file"
    file.write_text(SCHEMA, encoding="utf-8")
    cases = [
        (("--json-schema", str(file), "--compact"), {"json_schema": SCHEMA, "disable_any_whitespace": True}),
        (("--json-schema", "-"), {"json_schema": "from stdin"}),
        (("--json-object",), {"json_object": True}),
        (("--regex", "a+"), {"regex": "a+"}),
        (("--grammar", str(file)), {"grammar": SCHEMA}),
        (("--choice", "b", "--choice", "a"), {"choice": pb.Choices(values=["b", "a"])}),
    ]
    for arguments, _ in cases:
        result = run("generate", "--prompt", "x", *arguments, stdin="from stdin")
        assert result.exit_code == 0, result.stderr
    sent = [request.sampling.structured_output for request in fakes.inference.requests]
    assert sent == [pb.StructuredOutput(**fields) for _, fields in cases]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--regex", "a", "--choice", "b"),
        ("--json-object", "--grammar", "-"),
        ("--compact",),
        ("--compact", "--regex", "a"),
        ("--json-schema", "/nowhere/at/all"),
    ],
)
def test_wrong_usage(run: Run, fakes: FakeServices, arguments: tuple[str, ...]) -> None:
    """Two constraints, an option that means nothing, a file that is not there: exit code 2, nothing sent."""
    assert run("generate", "--prompt", "x", *arguments).exit_code == 2
    assert not fakes.inference.requests
