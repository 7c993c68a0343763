"""Golden parity in bfloat16 through a whole node on a GPU, graphs and overlap on: base and every adapter.

The bound is what the reference itself moves when it computes in bfloat16 (the fixtures' own checker); greedy
tokens must agree wherever the reference's margin is larger than that. Every family runs its own kernels:
heads of 16 to 32 elements, experts of 32 to 96, latent and chunked attention, every kind of router.
"""

import asyncio
from pathlib import Path

import pytest

from tests.support.golden import FIXTURES, GOLDEN_MODELS, GoldenModel, golden_answers, judged_in_bfloat16
from tests.support.stack import Stack

# What the golden prompts need and no more: every shape is compiled or captured before the first answer.
LIMITS = (
    *("--max-step-tokens", "256", "--max-running-requests", "32", "--max-context-tokens", "512"),
    *("--graph-batch-sizes", "1,4,12,32", "--graph-token-counts", "64,160,256"),
    *("--adapter-arena-bytes", str(64 << 20), "--host-pool-bytes", str(64 << 20)),
)


@pytest.mark.parametrize("model", GOLDEN_MODELS, ids=lambda model: model.name)
async def test_base_and_all_adapters(model: GoldenModel, tmp_path: Path) -> None:
    """Each alone, then all in mixed batches; nothing is compiled after the start."""
    flags = ["--max-top-logprobs", str(model.vocab_size), "--log-format", "json", *LIMITS]
    async with Stack(
        FIXTURES / "models" / model.name, tmp_path, node_flags=flags, dtype="bfloat16", device="cuda"
    ) as stack:
        cases: dict[str | None, str] = {None: model.base}
        for adapter in model.adapters():
            cases[f"demo/{adapter['name']}"] = adapter["golden"]
            await stack.upload(FIXTURES / adapter["dir"], f"demo/{adapter['name']}")
            await stack.wait_known(f"demo/{adapter['name']}")
        alone = {name: await golden_answers(stack, model, name) for name in cases}
        mixed = dict(
            zip(cases, await asyncio.gather(*(golden_answers(stack, model, n) for n in cases)), strict=True)
        )
        compilations = (await stack.status()).compilations
    failures: list[str] = []
    decided = 0
    for kind, answers in (("alone", alone), ("mixed", mixed)):
        for name, golden in cases.items():
            verdicts = judged_in_bfloat16(golden, answers[name])
            decided += sum(ok is True for ok, _ in verdicts)
            failures += [f"{kind} {name}: {text}" for ok, text in verdicts if ok is False]
    print(f"{model.name}: {decided} comparisons decided")
    assert not failures, "\n".join(failures)
    assert decided >= 2 * len(cases), "almost everything was undecidable"
    assert compilations == 0
