"""Trains the three LoRA adapters on the saved base model and saves them as peft does.

    python -m examples.storyteller.train_adapters --device cuda --minutes 0.5

Each adapts the attention projections and the stacked expert weights, each with another rank.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeForCausalLM

from examples.storyteller.make_corpus import HERE
from examples.storyteller.training import FitConfig, Rows, fit, load_rows

BASE_NAME = "lorikeet/storyteller"


@dataclass(frozen=True, slots=True)
class Recipe:
    """One adapter's size and scaling."""

    rank: int
    alpha: int
    use_rslora: bool = False


RECIPES = {
    "pirate": Recipe(rank=8, alpha=16),
    "json": Recipe(rank=16, alpha=16, use_rslora=True),
    "shouting": Recipe(rank=4, alpha=8),
}


def train(style: str, rows: Rows, arguments: argparse.Namespace) -> None:
    """Train one adapter on top of the bfloat16 base, computing in float32 (or autocast on a GPU)."""
    recipe = RECIPES[style]
    torch.manual_seed(0)
    base = Qwen3MoeForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(arguments.device)
    base.set_experts_implementation("dense")
    model = get_peft_model(
        base,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=recipe.rank,
            lora_alpha=recipe.alpha,
            use_rslora=recipe.use_rslora,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    )
    print(f"{style}: {model.num_parameters(only_trainable=True)} parameters", flush=True)
    fit(
        model,
        rows,
        FitConfig(
            minutes=arguments.minutes,
            steps=arguments.steps,
            batch_rows=arguments.batch_rows,
            peak_learning_rate=2e-3,
            weight_decay=0.0,
        ),
    )
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    folder = arguments.out / style
    # save_embedding_layers=False: else peft looks the base's name up on the hub, to see if it was resized.
    model.to(torch.bfloat16).save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # peft's empty model card


def main() -> None:
    """Train the adapters that were asked for, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=0.5, help="time for each adapter's training loop")
    parser.add_argument("--steps", type=int, help="instead of --minutes: the number of steps")
    parser.add_argument("--documents", type=int, default=40_000, help="for each adapter")
    parser.add_argument("--batch-rows", type=int, default=64)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--out", type=Path, default=HERE / "adapters")
    parser.add_argument("styles", nargs="*", default=list(RECIPES), metavar="style", help=", ".join(RECIPES))
    arguments = parser.parse_args()
    for style in arguments.styles:
        if style not in RECIPES:
            parser.error(f"style {style!r} is unknown; use {', '.join(RECIPES)}")
    # Every corpus first: the writing forks, which a process that uses a GPU must not do.
    tokenizer_file = arguments.model / "tokenizer.json"
    corpora = {
        style: load_rows(style, arguments.documents, tokenizer_file, arguments.workers)
        for style in arguments.styles
    }
    for style, rows in corpora.items():
        train(style, rows, arguments)


if __name__ == "__main__":
    main()
