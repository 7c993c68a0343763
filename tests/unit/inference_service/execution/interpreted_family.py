"""One fixture model by its kernels in Triton's interpreter against the golden outputs; its name is argv[1].

Run by test_families_interpreted.py, a process each. The base and adapters that between them change most kinds
of sites share a batch: a prompt, then decode steps.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from tests.support import interpreted_ops

interpreted_ops.install()

import numpy as np  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from tests.support.golden import CHECKER, FIXTURES, GOLDEN_MODELS, prompts  # noqa: E402
from tests.support.ingested import activate  # noqa: E402
from tests.support.runner import GREEDY, Driven, DrivenRequest, drive, make_backend  # noqa: E402

PROMPT = "p7"


def verdicts(golden: str, driven: Driven) -> list[tuple[bool | None, str]]:
    """The checker's, of the first token's whole distribution and of the greedy tokens."""
    last = f"last.{PROMPT}"
    gold = load_file(FIXTURES / f"{golden}.safetensors")[last].astype(np.float64)
    gold -= np.logaddexp.reduce(gold)
    entry = driven.logprobs[0]
    row = np.zeros(len(gold), np.float32)
    row[list(entry.top_ids)] = entry.top_logprobs
    info = json.loads((FIXTURES / f"{golden}.json").read_text())
    greedy = {"prompts": {PROMPT: {"greedy": driven.token_ids}}}
    return CHECKER.compare({last: gold.astype(np.float32)}, info, {last: row}, greedy, "fp32")


def main(name: str, num_adapters: int, num_tokens: int) -> None:
    """Run the model."""
    model = next(model for model in GOLDEN_MODELS if model.name == name)
    backend = make_backend(name)
    goldens = [model.base]
    with tempfile.TemporaryDirectory() as scratch:
        for slot, adapter in enumerate(model.mixed[:num_adapters]):
            activate(backend, f"{model.golden}/{adapter}", slot, Path(scratch))
            goldens.append(next(a["golden"] for a in model.adapters() if a["name"] == adapter))
        sampling = dataclasses.replace(GREEDY, logprobs=model.vocab_size)
        requests = [DrivenRequest(prompts()[PROMPT], slot - 1, sampling) for slot in range(len(goldens))]
        results = drive(backend, requests, num_tokens=num_tokens)
    for golden, driven in zip(goldens, results, strict=True):
        found = verdicts(golden, driven)
        assert any(ok is True for ok, _ in found), found
        assert not [text for ok, text in found if ok is False], (golden, found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
