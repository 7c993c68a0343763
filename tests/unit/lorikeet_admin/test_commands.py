"""Every command against the fake services: what it prints, its JSON, its exit code."""

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from lorikeet.inference.v1 import generation_pb2 as pb
from lorikeet_contract.status import StatusCode
from tests.support.command_line import Run, documents
from tests.support.fake_services import FakeServices, make_adapter, service_error


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (("adapters", "list"), {"adapters"}),
        (
            ("adapters", "show", "demo/a0"),
            {"name", "revisions", "aliases", "current_digest", "etag", "pinned"},
        ),
        (("adapters", "alias", "demo/a0", "beta"), {"name", "aliases"}),
        (("adapters", "alias", "demo/a0", "beta", "--remove"), {"name", "aliases"}),
        (("adapters", "pin", "demo/a0"), {"name", "pinned"}),
        (("adapters", "unpin", "demo/a0"), {"name", "pinned"}),
        (("adapters", "report", "demo/a0"), {"name", "digest", "report", "probe"}),
        (("adapters", "probe", "demo/a0"), {"name", "digest", "probe"}),
        (("adapters", "load", "demo/a0"), {"placements"}),
        (("adapters", "unload", "demo/a0"), {"placements"}),
        (("adapters", "rm", "demo/a0"), {"deleted"}),
        (("residency",), {"placements"}),
        (("model", "show"), {"name", "limits", "lora_schema", "status", "instance_id"}),
        (("tenants", "create", "acme", "--weight", "2"), {"name", "limits", "tokens", "etag"}),
        (("tenants", "list"), {"tenants"}),
        (("tenants", "token", "acme"), {"token", "record"}),
        (("tenants", "revoke", "acme", "abc"), {"revoked"}),
        (("tenants", "rm", "acme"), {"deleted"}),
    ],
)
def test_json_of_each_command(run: Run, arguments: tuple[str, ...], keys: set[str]) -> None:
    """One JSON object on stdout and nothing else; without --json something for people; 0 both times."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    (document,) = documents(result)
    assert keys <= set(document)
    plain = run(*arguments)
    assert plain.exit_code == 0, plain.stderr
    assert plain.stdout.strip()
    assert not plain.stdout.startswith("{")


def test_push_reports_what_was_matched(run: Run, fakes: FakeServices, adapter_dir: Path) -> None:
    """The options arrive, the report is printed with layers folded, warnings too."""
    result = run(
        *("adapters", "push", str(adapter_dir), "--name", "demo/a", "--alias", "prod", "--alias", "beta"),
        *("--expert-packing", "expert-major", "--expert-orientation", "exchanged"),
    )
    assert result.exit_code == 0, result.stderr
    assert "demo/a registered" in result.stdout
    assert "0-1" in result.stdout
    assert "4 of 5 tensors used, 1 without effect" in result.stdout
    assert "warning: odd" in result.stdout
    (header,) = fakes.adapters.headers
    assert list(header.aliases) == ["prod", "beta"]
    assert (header.expert_packing, header.expert_orientation) == (2, 2)


def test_push_validates_only(run: Run, fakes: FakeServices, adapter_dir: Path) -> None:
    """Nothing is stored, and an alias that would point at nothing is refused unsent."""
    push = ("adapters", "push", str(adapter_dir), "--name", "demo/a", "--validate-only")
    assert run(*push, "--alias", "prod").exit_code == 2
    result = run(*push)
    assert result.exit_code == 0, result.stderr
    assert "demo/a is valid, nothing stored" in result.stdout
    (header,) = fakes.adapters.headers
    assert header.validate_only


def test_push_says_once_that_it_tries_again(run: Run, fakes: FakeServices, adapter_dir: Path) -> None:
    """On stderr, with what failed and the pause; the result is alone on stdout."""
    away = service_error(StatusCode.UNAVAILABLE, "the store is away", retry_after_s=0.001)
    fakes.faults.add("Upload", away, away)
    result = run("adapters", "push", str(adapter_dir), "--name", "demo/a", "--json")
    assert [line for line in result.stderr.splitlines() if "trying again" in line] == [
        "trying again in 0.0 s: the store is away"
    ]
    assert [document["created"] for document in documents(result)] == [True]


def test_push_json(run: Run, adapter_dir: Path) -> None:
    """No progress bar, one object with the whole report."""
    (document,) = documents(run("adapters", "push", str(adapter_dir), "--name", "demo/a", "--json"))
    assert document["created"] is True
    assert document["revision"]["report"]["sites"][1]["layer"] == 1


def test_push_refused_here(run: Run, fakes: FakeServices, adapter_dir: Path) -> None:
    """A pickle is refused with what to do, unsent: exit code 1."""
    (adapter_dir / "adapter_model.safetensors").rename(adapter_dir / "adapter_model.bin")
    result = run("adapters", "push", str(adapter_dir), "--name", "demo/a")
    assert result.exit_code == 1
    assert "safe_serialization=True" in result.stderr
    assert result.stdout == ""
    assert fakes.faults.calls == []


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (StatusCode.INVALID_ARGUMENT, 1),
        (StatusCode.ALREADY_EXISTS, 1),
        (StatusCode.RESOURCE_EXHAUSTED, 1),
        (StatusCode.INTERNAL, 1),
        (StatusCode.NOT_FOUND, 3),
        (StatusCode.UNAVAILABLE, 4),
        (StatusCode.UNAUTHENTICATED, 5),
        (StatusCode.PERMISSION_DENIED, 5),
        (StatusCode.DEADLINE_EXCEEDED, 6),
    ],
)
def test_exit_codes(run: Run, fakes: FakeServices, code: StatusCode, exit_code: int) -> None:
    """Each kind of failure has its code; its message is on stderr, with --json an object on stdout too."""
    fakes.faults.add("GetAdapter", *[service_error(code, "what is wrong", reason="SOME_REASON")] * 2)
    plain = run("adapters", "show", "demo/a0")
    assert (plain.exit_code, plain.stdout) == (exit_code, "")
    assert plain.stderr.startswith("error: what is wrong\n")
    (document,) = documents(run("adapters", "show", "demo/a0", "--json"))
    assert document["error"]["exit_code"] == exit_code
    assert (document["error"]["reason"], document["error"]["code"]) == ("SOME_REASON", code.value)


def test_a_missing_tenant_has_advice_of_its_own(run: Run, fakes: FakeServices, adapter_dir: Path) -> None:
    """A list of adapters would not help."""
    error = service_error(StatusCode.NOT_FOUND, "there is no tenant 'x'", reason="TENANT_NOT_FOUND")
    fakes.faults.add("Upload", error)
    result = run("adapters", "push", str(adapter_dir), "--name", "x/a")
    assert result.exit_code == 3
    assert "hint: `lorikeet tenants list` shows" in result.stderr


def test_no_traceback_and_advice_when_nothing_listens(run: Run) -> None:
    """The commonest mistake says what to start."""
    result = run("adapters", "list", LORIKEET_MANAGER="127.0.0.1:1")
    assert result.exit_code == 4
    assert "lorikeet up" in result.stderr
    assert "Traceback" not in result.stderr


def test_bad_tokens(run: Run) -> None:
    """An unknown token is denied with advice; one with a line break is refused here, without being shown."""
    denied = run("adapters", "list", LORIKEET_TOKEN="other")
    assert denied.exit_code == 5
    assert "LORIKEET_TOKEN" in denied.stderr
    broken = run("adapters", "list", LORIKEET_TOKEN="lk_x\nlk_y")
    assert broken.exit_code == 1
    assert "lk_x" not in broken.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("adapters", "push", "."),
        ("adapters", "nonsense"),
        ("generate",),
        ("generate", "--prompt", "x", "--chat", "y"),
        ("generate", "--prompt", "x", "--system", "y"),
        ("generate", "--prompt", "x", "--template-arguments", "{}"),
        ("generate", "--chat", "x", "--template-arguments", "{"),
        ("generate", "--chat", "x", "--template-arguments", "[]"),
        ("adapters", "alias", "a", "b", "--remove", "--digest", "d"),
        ("up", "--model-dir", "/nonexistent"),
        ("bench", "soak", "--running", "--pid", "manager"),
        ("bench", "soak", "--json", "/nonexistent/result.json"),
    ],
)
def test_usage_errors(run: Run, arguments: tuple[str, ...]) -> None:
    """A wrong command line is 2, before anything is sent."""
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("adapters", "nonsense", "--json"), "nonsense"),
        (("adapters", "push", ".", "--json"), "--name"),
        (("generate", "--json"), "--prompt"),
        (("generate", "--prompt", "x", "--top-k", "many", "--json"), "--top-k"),
        (("residency", "--nonsense", "--json"), "--nonsense"),
        (("--timeout", "never", "residency", "--json"), "--timeout"),
    ],
)
def test_usage_errors_as_json(run: Run, arguments: tuple[str, ...], word: str) -> None:
    """A program that calls wrongly gets a document on stdout, people their words on stderr, both a 2."""
    result = run(*arguments)
    assert result.exit_code == 2
    (document,) = documents(result)
    assert document["error"]["exit_code"] == 2
    assert word in document["error"]["message"]
    assert result.stderr


def test_usage_errors_of_a_command_that_writes_json_into_a_file(run: Run) -> None:
    """Its --json is no promise about stdout."""
    result = run("bench", "soak", "--json", "x.json", "--streams", "none")
    assert (result.exit_code, result.stdout) == (2, "")


def test_version(run: Run) -> None:
    """Which release this is; no service is needed."""
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"lorikeet {metadata.version('lorikeet')}\n")


@pytest.mark.parametrize("terminal", ["dumb", "xterm"])
def test_tables_in_a_pipe_are_not_cut(run: Run, fakes: FakeServices, terminal: str) -> None:
    """Whatever the surroundings say of a terminal's size: a row is a line, and every cell is whole."""
    name = "a" * 63
    fakes.adapters.adapters = [make_adapter(name)]
    result = run("adapters", "list", TERM=terminal, COLUMNS="40")
    assert result.exit_code == 0, result.stderr
    assert f"demo/{name} " in result.stdout


def test_load_that_failed_on_a_node(run: Run) -> None:
    """The placements are printed, and the exit code tells."""
    result = run("adapters", "load", "demo/toobig", "--json")
    assert result.exit_code == 1
    assert documents(result)[0]["placements"][0]["failure"] == "no room"
    assert "not loaded on 1 of 1 nodes: no room" in result.stderr


def test_names_with_brackets_are_printed_as_they_are(run: Run, fakes: FakeServices) -> None:
    """Rich would read [red] as a colour."""
    fakes.adapters.adapters = [make_adapter("a0")]
    fakes.adapters.adapters[0].revisions[0].failure = "bad [red]value[/red]"
    assert "bad [red]value[/red]" in run("adapters", "show", "demo/a0").stdout


def test_generate_streams_text(run: Run, fakes: FakeServices) -> None:
    """The text on stdout, a summary on stderr; sampling flags arrive."""
    result = run(
        *("generate", "--prompt", "one two", "--adapter", "a0", "--temperature", "0", "--top-p", "0.5"),
        *(
            "--top-k",
            "3",
            "--seed",
            "1",
            "--max-tokens",
            "9",
            "--stop",
            "x",
            "--stop",
            "y",
            "--stop-token",
            "4",
        ),
        *("--ignore-eos", "--request-id", "r", "--min-p", "0.25", "--presence-penalty", "-1"),
        *("--frequency-penalty", "0.5", "--repetition-penalty", "1.5", "--min-tokens", "2"),
        *("--bad-word", "no", "--bad-word", "never"),
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "onetwo\n"
    assert "[length]" in result.stderr
    assert "demo/a0 dddddddddddd (was host)" in result.stderr
    (request,) = fakes.inference.requests
    assert request.adapter == "a0"
    assert request.request_id == "r"
    assert request.sampling == pb.SamplingParams(
        temperature=0,
        top_p=0.5,
        top_k=3,
        seed=1,
        max_tokens=9,
        ignore_eos=True,
        stop_strings=["x", "y"],
        stop_token_ids=[4],
        min_p=0.25,
        presence_penalty=-1,
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        min_tokens=2,
        bad_words=["no", "never"],
    )


def test_generate_json_lines(run: Run, fakes: FakeServices) -> None:
    """One delta a line; the last has the finish."""
    deltas = documents(run("generate", "--prompt", "one two", "--logprobs", "1", "--json"))
    assert [delta["text"] for delta in deltas] == ["one", "two", ""]
    assert deltas[0]["tokens"][0]["logprob"] == -0.5
    assert deltas[-1]["finish"]["reason"] == "length"
    assert fakes.inference.requests[0].sampling.logprobs == 1


def test_generate_several_samples(run: Run, fakes: FakeServices) -> None:
    """Each sample's text stays together, in order, whatever order the pieces came in; usage is of all."""

    def script(request: Any, context: Any) -> Iterator[Any]:
        def finish(prompt: int, output: int) -> pb.Finish:
            usage = pb.Usage(prompt_tokens=prompt, output_tokens=output)
            return pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=usage)

        pieces = [
            (1, "b1", 0),
            (0, "a1", 0),
            (1, " b2", 2),
            (0, " a2\n", 0),
            (2, "c", 0),
            (0, "", 2),
            (2, "", 1),
        ]
        for sequence, (index, text, count) in enumerate(pieces):
            end = finish(0 if index else 5, count) if count else None
            yield pb.GenerateResponse(sequence=sequence, index=index, text_delta=text, finish=end)

    fakes.inference.script = script
    result = run("generate", "--prompt", "x", "--n", "3")
    assert result.exit_code == 0, result.stderr
    assert fakes.inference.requests[0].sampling.n == 3
    assert result.stdout == "--- sample 0\na1 a2\n--- sample 1\nb1 b2\n--- sample 2\nc\n"
    assert "5 prompt (0 cached) + 5 output tokens" in result.stderr
    deltas = documents(run("generate", "--prompt", "x", "--n", "3", "--json"))
    assert [delta["index"] for delta in deltas] == [1, 0, 1, 0, 2, 0, 2]


def test_generate_chat_from_stdin(run: Run, fakes: FakeServices) -> None:
    """A dash reads the message from stdin; --system goes before it."""
    fakes.inference.script = lambda *_: iter([pb.GenerateResponse(finish=pb.Finish(reason=1))])  # type: ignore[arg-type]
    arguments = ("--template-arguments", '{"b": [1], "a": "x"}', "--keep-special-tokens")
    result = run("generate", "--chat", "-", "--system", "s", *arguments, stdin="from stdin")
    assert result.exit_code == 0, result.stderr
    (request,) = fakes.inference.requests
    assert json.loads(request.chat.template_arguments_json) == {"b": [1], "a": "x"}
    assert not request.sampling.skip_special_tokens
    assert request.sampling.HasField("skip_special_tokens")
    assert [(m.role, m.content) for m in request.chat.messages] == [("system", "s"), ("user", "from stdin")]


@pytest.mark.parametrize(
    ("reason", "exit_code"), [(pb.FINISH_REASON_DEADLINE, 6), (pb.FINISH_REASON_ABORTED, 1)]
)
def test_generate_that_was_stopped(run: Run, fakes: FakeServices, reason: Any, exit_code: int) -> None:
    """Text cut short by the server is no success."""
    finish = pb.Finish(reason=reason)
    fakes.inference.script = lambda *_: iter([pb.GenerateResponse(text_delta="cut", finish=finish)])
    result = run("generate", "--prompt", "x")
    assert (result.exit_code, result.stdout) == (exit_code, "cut\n")


def test_generate_that_fails_in_mid_stream(run: Run, fakes: FakeServices) -> None:
    """What came is printed; the error follows, in JSON as the last line."""

    def script(request: Any, context: Any) -> Iterator[Any]:
        yield pb.GenerateResponse(text_delta="so far")

    fakes.inference.script = script
    plain = run("generate", "--prompt", "x")
    assert (plain.exit_code, plain.stdout) == (1, "so far\n")
    assert "ended without its finish" in plain.stderr
    *_, last = documents(run("generate", "--prompt", "x", "--json"))
    assert last["error"]["exit_code"] == 1


def test_timeout_option(run: Run, fakes: FakeServices) -> None:
    """--timeout bounds the call: 6."""

    def script(request: Any, context: Any) -> Iterator[Any]:
        fakes.inference.ended.wait(10)
        yield pb.GenerateResponse()

    fakes.inference.script = script
    assert run("--timeout", "0.2", "generate", "--prompt", "x").exit_code == 6
