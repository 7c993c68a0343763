"""What both trainers share: packed rows of token ids, one fast experts forward, and the training loop."""

import math
import random
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from examples.storyteller.make_corpus import END_OF_TEXT, document

ROW_TOKENS = 512
IGNORED = -100  # the label that the loss skips
_Encoded: TypeAlias = NDArray[np.int16]  # [2, tokens]: ids and labels
_CHUNK_DOCUMENTS = 2_000
_MEASURED_STEPS = 30  # the first third of them is warm-up of the device and not timed


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed training rows: `input_ids` and `labels`, both [rows, ROW_TOKENS]."""

    input_ids: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True, slots=True)
class FitConfig:
    """How long and how hard to train. Without `steps` the number that fits into `minutes` is measured."""

    minutes: float
    steps: int | None
    batch_rows: int
    peak_learning_rate: float
    weight_decay: float
    seed: int = 0


def load_rows(kind: str, num_documents: int, tokenizer_file: Path, workers: int) -> Rows:
    """Write, tokenize and pack a corpus; the same rows for any number of workers."""
    chunks = range(math.ceil(num_documents / _CHUNK_DOCUMENTS))
    encode = partial(_encode_chunk, kind, str(tokenizer_file))
    if workers == 1:
        return _pack((one for chunk in chunks for one in encode(chunk)), tokenizer_file)
    with ProcessPoolExecutor(workers) as pool:
        return _pack((one for chunk in pool.map(encode, chunks) for one in chunk), tokenizer_file)


def _encode_chunk(kind: str, tokenizer_file: str, chunk: int) -> list[_Encoded]:
    tokenizer = Tokenizer.from_file(tokenizer_file)
    rng = random.Random(f"{kind}/{chunk}")
    encoded: list[_Encoded] = []
    for _ in range(_CHUNK_DOCUMENTS):
        input_ids: list[int] = []
        labels: list[int] = []
        for segment in document(kind, rng):
            ids = tokenizer.encode(segment.text).ids
            input_ids += ids
            labels += ids if segment.is_learned else [IGNORED] * len(ids)
        encoded.append(np.array((input_ids, labels), np.int16))
    return encoded


def _pack(documents: Iterable[_Encoded], tokenizer_file: Path) -> Rows:
    """Lay whole documents one after another into rows; every row starts with one, as every request does."""
    end_of_text: int = Tokenizer.from_file(str(tokenizer_file)).token_to_id(END_OF_TEXT)
    padding = np.repeat(np.array([[end_of_text], [IGNORED]], np.int16), ROW_TOKENS, axis=1)
    rows: list[_Encoded] = []
    row: list[_Encoded] = []
    length = 0
    for one in documents:
        assert one.shape[1] <= ROW_TOKENS, "the grammar's longest document fits into a row"
        if length + one.shape[1] > ROW_TOKENS:
            rows.append(np.concatenate((*row, padding), axis=1)[:, :ROW_TOKENS])
            row, length = [], 0
        row.append(one)
        length += one.shape[1]
    rows.append(np.concatenate((*row, padding), axis=1)[:, :ROW_TOKENS])
    packed = torch.from_numpy(np.stack(rows, axis=1))  # [2, rows, ROW_TOKENS]
    return Rows(packed[0], packed[1])


def dense_experts(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run every expert on every token, [T, H] -> [T, H], with weight 0 where a token did not choose it.

    With 8 small experts this is two large matrix products instead of 8 gathers and 16 small ones: four times
    the arithmetic in a fraction of the launches, and nothing waits for the device.
    """
    gate_up_proj, down_proj = self.gate_up_proj, self.down_proj  # [E, 2I, H], [E, H, I]
    num_experts, _, hidden_size = gate_up_proj.shape
    weights = torch.zeros(
        (hidden_states.shape[0], num_experts), dtype=top_k_weights.dtype, device=hidden_states.device
    ).scatter(1, top_k_index, top_k_weights)  # [T, E]
    gate_up = F.linear(hidden_states, gate_up_proj.flatten(0, 1)).unflatten(1, (num_experts, -1))
    gate, up = gate_up.chunk(2, dim=-1)  # [T, E, I]
    act = F.silu(gate) * up * weights.unsqueeze(-1)
    return act.flatten(1) @ down_proj.transpose(1, 2).reshape(-1, hidden_size).to(act.dtype)


ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)


def fit(model: PreTrainedModel, rows: Rows, config: FitConfig) -> int:
    """Train the parameters that want a gradient and return the number of steps taken."""
    device = next(model.parameters()).device
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [one for one in parameters if one.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [one for one in parameters if one.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    input_ids, labels = rows.input_ids.to(device), rows.labels.to(device)
    generator = torch.Generator(device).manual_seed(config.seed)
    order = torch.randperm(len(input_ids), device=device, generator=generator)
    num_steps = config.steps or 1_000_000
    started = timed = time.perf_counter()
    position = step = 0
    model.train()
    while step < num_steps:
        if position + config.batch_rows > len(order):
            order, position = torch.randperm(len(input_ids), device=device, generator=generator), 0
        batch = order[position : position + config.batch_rows]
        position += config.batch_rows
        for group in optimizer.param_groups:
            group["lr"] = config.peak_learning_rate * _schedule(step, num_steps)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=input_ids[batch].long(), labels=labels[batch].long(), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step == _MEASURED_STEPS // 3:
            _ = loss.item()  # waits for the device
            timed = time.perf_counter()
        if step == _MEASURED_STEPS and config.steps is None:
            _ = loss.item()
            now = time.perf_counter()
            per_step = (now - timed) / (_MEASURED_STEPS * 2 / 3)
            num_steps = step + max(1, int((config.minutes * 60 - (now - started)) / per_step))
            print(f"  {per_step * 1e3:.1f} ms a step: {num_steps} steps", flush=True)
        if step % 200 == 0 or step == num_steps:
            elapsed = time.perf_counter() - started
            print(f"  step {step} loss {loss.item():.4f} after {elapsed:.0f} s", flush=True)
    return num_steps


def _schedule(step: int, num_steps: int) -> float:
    """The learning rate's share of its peak: up over 100 steps, then down along a cosine to a hundredth."""
    if step < 100:
        return (step + 1) / 100
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - 100) / max(1, num_steps - 100)))
