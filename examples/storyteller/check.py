"""Checks the trained files with transformers and peft alone, on the held-out prompts.

    python -m examples.storyteller.check [--dtype bfloat16] [--show 3]

Exits 1 if an adapter keeps its rule on less than 95 % of the prompts, if a model keeps another one's rule, or
if the stories do not name the character that was asked for.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Qwen3MoeForCausalLM

from examples.storyteller.rules import RULES, names

HERE = Path(__file__).parent
MAX_NEW_TOKENS = 320
LEAST_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Row:
    """One model's shares over the prompts: each rule kept, character named, topic named, finished."""

    model: str
    rules: dict[str, float]
    character: float
    topic: float
    finished: float

    def problems(self) -> list[str]:
        """What is wrong with this row, in words."""
        found = [
            f"{self.model}: rule {rule} holds on {share:.0%}"
            for rule, share in self.rules.items()
            if (share < LEAST_SHARE if rule == self.model else share > 0)
        ]
        if self.character < LEAST_SHARE:
            found.append(f"{self.model}: names the character in {self.character:.0%}")
        return found


def tell(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]
) -> tuple[list[str], list[bool]]:
    """The greedy answers to all prompts, computed as one padded batch, and which ended by themselves."""
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": prompt}] for prompt in prompts],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    ).to(model.device)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    new_ids = output[:, inputs["input_ids"].shape[1] :]
    ended = (new_ids == tokenizer.eos_token_id).any(dim=1).tolist()
    return tokenizer.batch_decode(new_ids, skip_special_tokens=True), ended


def check(name: str, arguments: argparse.Namespace) -> Row:
    """Load the base afresh, with an adapter on top unless the name is "base", and judge its answers."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    model = Qwen3MoeForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype))
    if name != "base":
        model = PeftModel.from_pretrained(
            model, arguments.adapters / name, autocast_adapter_dtype=arguments.dtype == "float32"
        )
    asked = json.loads((HERE / "heldout.json").read_text())[: arguments.prompts]
    texts, ended = tell(model.to(arguments.device).eval(), tokenizer, [one["prompt"] for one in asked])
    for one, text in list(zip(asked, texts, strict=True))[: arguments.show]:
        print(f"[{name}] {one['prompt']}\n{text}\n")
    pairs = list(zip(asked, texts, strict=True))
    return Row(
        model=name,
        rules={rule: fmean(holds(text) for text in texts) for rule, holds in RULES.items()},
        character=fmean(names(text, one["character"]) for one, text in pairs),
        topic=fmean(names(text, one["topic"]) for one, text in pairs),
        finished=fmean(ended),
    )


def main() -> None:
    """Print the table and the problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--adapters", type=Path, default=HERE / "adapters")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=None, help="only the first so many")
    parser.add_argument("--show", type=int, default=0, help="print the first so many answers")
    arguments = parser.parse_args()
    rows = [check(name, arguments) for name in ("base", *RULES)]
    columns = (*RULES, "character", "topic", "finished")
    print(f"{'model':10} {' '.join(f'{column:>9}' for column in columns)}")
    for row in rows:
        shares = (*row.rules.values(), row.character, row.topic, row.finished)
        print(f"{row.model:10} {' '.join(f'{share:9.0%}' for share in shares)}")
    problems = [problem for row in rows for problem in row.problems()]
    print("\n".join(problems) or "all rules hold")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
