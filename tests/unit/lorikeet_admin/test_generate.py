"""What `lorikeet generate` tells of its request, and options about single tokens."""

from collections.abc import Iterator
from typing import Any

import pytest

from lorikeet.inference.v1 import generation_pb2 as pb
from tests.support.command_line import Run, documents
from tests.support.fake_services import FakeServices


def _ended(index: int, num_output: int, queue_ms: float, decode_ms: float) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        sequence=index,
        index=index,
        text_delta="text",
        finish=pb.Finish(
            reason=pb.FINISH_REASON_LENGTH,
            usage=pb.Usage(output_tokens=num_output),
            timings=pb.Timings(queue_ms=queue_ms, adapter_wait_ms=20, prefill_ms=30, decode_ms=decode_ms),
        ),
    )


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([(101, 10, 2000)], "first token 60 ms, 50 tokens/s, "),
        ([(1, 10, 0)], "first token 60 ms, base"),
        ([(0, 10, 0)], "0 output tokens, base"),
        ([(101, 10, 2000), (51, 50, 1000)], "first token 60 ms, 75 tokens/s, "),
    ],
)
def test_the_summary_has_the_servers_times(
    run: Run, fakes: FakeServices, pieces: list[tuple[int, float, float]], words: str
) -> None:
    """All pieces come at once here, which says nothing about when they were made."""

    def script(request: Any, context: Any) -> Iterator[Any]:
        yield from (_ended(index, *piece) for index, piece in enumerate(pieces))

    fakes.inference.script = script
    result = run("generate", "--prompt", "x", "--n", str(len(pieces)))
    assert result.exit_code == 0, result.stderr
    assert words in result.stderr


def test_options_of_single_tokens(run: Run, fakes: FakeServices) -> None:
    """Biases, the stop's own text and the prompt's log-probabilities arrive."""
    result = run(
        *("generate", "--prompt", "x", "--logit-bias", "13=-2.5", "--logit-bias", "7=1", "--json"),
        *("--include-stop-string", "--prompt-logprobs", "0", "--logprobs", "2"),
    )
    assert result.exit_code == 0, result.stderr
    assert fakes.inference.requests[0].sampling == pb.SamplingParams(
        logit_bias={13: -2.5, 7: 1}, include_stop_string=True, prompt_logprobs=0, logprobs=2
    )


@pytest.mark.parametrize("arguments", [("hello", "world"), ("--prompt", "x", "hello", "world")])
def test_a_text_without_its_option(run: Run, fakes: FakeServices, arguments: tuple[str, ...]) -> None:
    """Is told which it may have; unknown options stay refused."""
    (document,) = documents(run("generate", *arguments, "--json"))
    assert document["error"]["message"].endswith(
        "unexpected 'hello world': use --prompt or --chat for a text"
    )
    result = run("generate", "--prompt", "x", "--hello")
    assert result.exit_code == 2
    assert "No such option" in result.stderr
    assert not fakes.inference.requests


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--logprobs", "-1", "--json"), "--logprobs"),
        (("--stop-token", "-1", "--json"), "--stop-token"),
        (("--logit-bias", "13", "--json"), "ID=VALUE"),
        (("--logit-bias", "a=1", "--json"), "ID=VALUE"),
        (("--logit-bias", "1=1", "--logit-bias", "1=2", "--json"), "twice"),
        (("--logprobs", "2"), ""),
        (("--prompt-logprobs", "2"), ""),
    ],
)
def test_wrong_usage(run: Run, fakes: FakeServices, arguments: tuple[str, ...], word: str) -> None:
    """Exit code 2, nothing sent; with --json a document that says why."""
    result = run("generate", "--prompt", "x", *arguments)
    assert result.exit_code == 2
    assert not fakes.inference.requests
    if word:
        (document,) = documents(result)
        assert word in document["error"]["message"]


def test_a_value_that_no_request_can_carry(run: Run, fakes: FakeServices) -> None:
    """Past the command line's own checks it is the client that refuses: no traceback, JSON all the same."""
    result = run("generate", "--prompt", "x", "--logit-bias", "-1=2", "--json")
    assert result.exit_code == 1
    (document,) = documents(result)
    assert document["error"]["message"].startswith("sampling.logit_bias: {-1: 2.0} is not")
    assert "Traceback" not in result.stderr
    assert not fakes.inference.requests


def test_help_shows_every_form_of_name(run: Run) -> None:
    """Square brackets would be taken for markup."""
    assert "name@alias" in run("generate", "--help").stdout
