"""Parity in bfloat16 on the CPU, within what the reference itself moves when it computes in bfloat16."""

from pathlib import Path

import pytest

from tests.support.golden import (
    FIXTURES,
    GOLDEN_MODELS,
    GoldenModel,
    golden_answers,
    judged_in_bfloat16,
)
from tests.support.stack import Stack

pytestmark = pytest.mark.long
ADAPTERS = ("attn-r8", "experts-r4", "attn-mlp-r16", "rslora-r4-patterns")  # experts, or a dense MLP


@pytest.mark.parametrize("model", GOLDEN_MODELS, ids=lambda model: model.name)
async def test_bfloat16(model: GoldenModel, tmp_path: Path) -> None:
    """The base and adapters on attention and experts; near-ties and early reroutings are the checker's."""
    flags = ["--max-top-logprobs", str(model.vocab_size)]
    cases: dict[str | None, str] = {None: model.base}
    async with Stack(FIXTURES / "models" / model.name, tmp_path, node_flags=flags, dtype="bfloat16") as stack:
        for adapter in (a for a in model.adapters() if a["name"] in ADAPTERS):
            cases[f"demo/{adapter['name']}"] = adapter["golden"]
            await stack.upload(FIXTURES / adapter["dir"], f"demo/{adapter['name']}")
            await stack.wait_known(f"demo/{adapter['name']}")
        assert len(cases) == 4
        verdicts = {
            name: judged_in_bfloat16(golden, await golden_answers(stack, model, name))
            for name, golden in cases.items()
        }
    print(*(f"{name}: {text}" for name, found in verdicts.items() for _, text in found), sep="\n")
    assert not [f"{name}: {text}" for name, found in verdicts.items() for ok, text in found if ok is False]
    # Not everything may be undecidable: the comparison over all positions decides for the base.
    assert any(ok for ok, text in verdicts[None] if text.startswith("all."))
