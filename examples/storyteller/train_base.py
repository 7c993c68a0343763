"""Trains the base model from scratch and saves it in bfloat16, as transformers lays it out.

    python -m examples.storyteller.train_base --device cuda --minutes 2

The tokenizer must be there already.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from examples.storyteller.make_corpus import END_OF_TEXT, HERE, IM_END
from examples.storyteller.training import FitConfig, fit, load_rows


def make_config(tokenizer: Tokenizer) -> Qwen3MoeConfig:
    """A Qwen3-MoE of 2.85 million parameters: 5.7 MB in bfloat16."""
    return Qwen3MoeConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        intermediate_size=384,  # for dense layers, of which there are none
        norm_topk_prob=True,
        router_aux_loss_coef=0.002,
        tie_word_embeddings=False,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )


def main() -> None:
    """Train, round, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=2.0, help="time for the training loop")
    parser.add_argument("--steps", type=int, help="instead of --minutes: the number of steps")
    parser.add_argument("--documents", type=int, default=240_000)
    parser.add_argument("--batch-rows", type=int, default=64)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tokenizer", type=Path, default=HERE / "model" / "tokenizer.json")
    parser.add_argument("--out", type=Path, default=HERE / "model")
    arguments = parser.parse_args()

    started = time.perf_counter()
    rows = load_rows("base", arguments.documents, arguments.tokenizer, arguments.workers)
    print(f"{len(rows.input_ids)} rows in {time.perf_counter() - started:.0f} s", flush=True)
    torch.manual_seed(0)
    config = make_config(Tokenizer.from_file(str(arguments.tokenizer)))
    model = Qwen3MoeForCausalLM(config).to(arguments.device)
    model.set_experts_implementation("dense")
    model.config.output_router_logits = True  # adds the load balancing loss
    print(f"{model.num_parameters()} parameters", flush=True)
    fit(
        model,
        rows,
        FitConfig(
            minutes=arguments.minutes,
            steps=arguments.steps,
            batch_rows=arguments.batch_rows,
            peak_learning_rate=3e-3,
            weight_decay=0.1,
        ),
    )
    model.config.output_router_logits = False
    model.generation_config = GenerationConfig(
        eos_token_id=[config.eos_token_id, config.pad_token_id], pad_token_id=config.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
