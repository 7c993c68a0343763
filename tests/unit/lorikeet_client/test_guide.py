"""The examples of samples and tools in docs/clients.md, as they stand, against a scripted server."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference_service.text.chat_template import ChatTemplate, ChatTurn
from lorikeet.inference.v1 import generation_pb2 as pb
from tests.support.chat_cases import TEMPLATES
from tests.support.fake_services import TOKEN, FakeServices

GUIDE = (Path(__file__).parents[3] / "docs" / "clients.md").read_text()


def example(heading: str) -> str:
    """The one Python block of a section."""
    section = GUIDE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return code


@pytest.fixture(autouse=True)
def environment(fakes: FakeServices, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the guide says to export."""
    monkeypatch.setenv("LORIKEET_INFERENCE", fakes.address)
    monkeypatch.setenv("LORIKEET_TOKEN", TOKEN)


def test_samples(fakes: FakeServices, capsys: pytest.CaptureFixture[str]) -> None:
    """Each sample's text is printed by both ways of reading it."""

    def script(request: Any, context: Any) -> Iterator[Any]:
        finish = pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(output_tokens=1))
        for sequence, index in enumerate((2, 0, 1)):
            yield pb.GenerateResponse(
                sequence=sequence, index=index, text_delta=f"text {index}", finish=finish
            )

    fakes.inference.script = script
    exec(example("Several samples"), {})
    assert [request.sampling.n for request in fakes.inference.requests] == [3, 3]
    printed = capsys.readouterr().out
    for index in range(3):
        assert f"{index} length text {index}\n" in printed
        assert f"{index} is ready: text {index}\n" in printed
    assert "output_tokens=3" in printed


def test_a_round_trip_with_a_tool(fakes: FakeServices, capsys: pytest.CaptureFixture[str]) -> None:
    """The call is answered, and the second request renders as the chat that the model should see."""
    call = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    answers = iter([f"I look.\n<tool_call>\n{call}\n</tool_call>", "It is 21.5 degrees."])

    def script(request: Any, context: Any) -> Iterator[Any]:
        yield pb.GenerateResponse(
            text_delta=next(answers), finish=pb.Finish(reason=pb.FINISH_REASON_STOP_TOKEN)
        )

    fakes.inference.script = script
    exec(example("Tools"), {})
    assert capsys.readouterr().out == "It is 21.5 degrees.\n"
    first, second = fakes.inference.requests
    assert len(first.chat.messages) == 1
    turns = [ChatTurn(m.role, m.content, json.loads(m.fields_json or "{}")) for m in second.chat.messages]
    rendered = ChatTemplate((TEMPLATES / "qwen3_like.jinja").read_text(), {}).render(
        turns,
        add_generation_prompt=True,
        max_characters=10_000,
        arguments=json.loads(second.chat.template_arguments_json),
    )
    assert rendered.endswith(
        "<|im_start|>user\nHow warm is it in Paris?<|im_end|>\n"
        f"<|im_start|>assistant\nI look.\n<tool_call>\n{call}\n</tool_call><|im_end|>\n"
        '<|im_start|>user\n<tool_response>\n{"city": "Paris", "celsius": 21.5}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n"
    )
    assert '"name": "get_weather", "description": "The temperature in a city."' in rendered
