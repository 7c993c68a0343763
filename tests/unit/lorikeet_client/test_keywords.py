"""Keyword options that nobody knows."""

import pytest

from lorikeet_client.generation import SamplingParams
from lorikeet_client.generation_messages import generate_request
from lorikeet_client.upload import plan_upload


@pytest.mark.parametrize("options", [{"adaptor": "demo/pirate"}, {"temperature": 0}, {"n": 2}])
def test_a_misspelt_option_is_no_base_request(options: dict[str, object]) -> None:
    """`adaptor=` must not be answered by the base model without a word."""
    with pytest.raises(TypeError, match=f"unknown option '{next(iter(options))}'; there are: .*adapter"):
        generate_request("hello", **options)  # type: ignore[arg-type]


def test_a_misspelt_upload_option_is_refused() -> None:
    """Before the directory is looked at."""
    with pytest.raises(TypeError, match="unknown option 'aliasses'"):
        plan_upload("/nowhere", "demo/a", aliasses=["prod"])  # type: ignore[call-arg]


def test_one_text_is_not_taken_letter_by_letter() -> None:
    """`stop_strings="END"` would stop at every E."""
    with pytest.raises(TypeError, match=r"write \['END'\]"):
        generate_request("hello", sampling=SamplingParams(stop_strings="END"))
