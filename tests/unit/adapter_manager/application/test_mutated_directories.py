"""Adapter directories damaged at random: refused or loaded, never a crash, a wait or raw text shown."""

import json
import random
import struct
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from adapter_manager.application.ingest import IngestTarget, ingest_directory
from adapter_manager.domain.errors import InvalidAdapterError, LimitExceededError
from tests.support.lora_schemas import FIXTURES, SCHEMAS

SOURCES = sorted(p for model in SCHEMAS for p in (FIXTURES / "adapters" / model).iterdir())
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    8,
    10**9,
    1e300,
    float("nan"),
    "x",
    "",
    [],
    {},
    [1],
    {"a": 1},
    "LORA",
    ["q_proj"],
    {"q_proj": 3},
    {"(": 1},
    {"(.*)+x": 2},
    {"((a|b)*)*!": 3},
    "0.18.1",
    "0.19.0",
    4,
    16,
    "pissa",
    "..",
    [[0, 1]],
]
RENAMES = [("0", "1"), ("lora_A", "lora_B"), ("experts", "expert"), ("model.", ""), (".weight", ".x.weight")]


def mutate(rng: random.Random, value: Any) -> None:
    """Change one thing somewhere in a JSON document, in place."""
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        chance = rng.random()
        if chance < 0.15:
            del value[key]
        elif chance < 0.3:
            old, new = rng.choice(RENAMES)
            value[key.replace(old, new) or "x"] = (
                deepcopy(value[key]) if rng.random() < 0.5 else value.pop(key)
            )
        elif isinstance(value[key], dict | list) and value[key] and rng.random() < 0.7:
            mutate(rng, value[key])
        else:
            value[key] = deepcopy(rng.choice(VALUES))  # a shared list could come to hold itself
    elif isinstance(value, list) and value:
        index = rng.randrange(len(value))
        item = value[index]
        if type(item) is int and rng.random() < 0.8:
            value[index] = rng.choice([item + 1, item - 1, item * 2, 0, -1, 1 << 63, item // 2])
        else:
            value[index] = deepcopy(rng.choice(VALUES))


def damaged(rng: random.Random, source: Path) -> tuple[bytes, bytes]:
    """Configuration and weights of a fixture after one to four accidents."""
    weights = (source / "adapter_model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", weights[:8])
    header, data = json.loads(weights[8 : 8 + length]), bytearray(weights[8 + length :])
    config = json.loads((source / "adapter_config.json").read_text())
    accidents = [rng.random() for _ in range(rng.choice([1, 1, 2, 4]))]
    for accident in accidents:
        if accident < 0.35:
            mutate(rng, config)
        elif accident < 0.7:
            mutate(rng, header)
        elif accident < 0.8:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    text = json.dumps(header).encode()
    files = [bytearray(json.dumps(config).encode()), bytearray(struct.pack("<Q", len(text)) + text + data)]
    if accidents[-1] > 0.8:
        file = rng.choice(files)
        if rng.random() < 0.4:
            del file[rng.randrange(len(file)) :]
        elif rng.random() < 0.7:
            file[rng.randrange(min(len(file), length + 8))] ^= 1 << rng.randrange(8)
        else:
            file += bytes(rng.randrange(1, 9))
    return bytes(files[0]), bytes(files[1])


def run(tmp_path: Path, seeds: range) -> dict[str, int]:
    """Ingest every damaged directory; returns how often each outcome came."""
    schemas = {model: make() for model, make in SCHEMAS.items()}
    outcomes: dict[str, int] = {}
    payload = tmp_path / "payload"
    for seed in seeds:
        rng = random.Random(seed)
        source = rng.choice(SOURCES)
        config, weights = damaged(rng, source)
        (tmp_path / "adapter_config.json").write_bytes(config)
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        started = time.perf_counter()
        try:
            ingest_directory(tmp_path, IngestTarget(schemas[source.parent.name], "b" * 64), payload)
            outcome = "loaded"
            payload.unlink()
        except (InvalidAdapterError, LimitExceededError) as error:
            outcome = error.reason
            assert error.message.isascii(), seed
            assert error.message.isprintable(), seed
            assert len(error.message) < 4000, seed
            assert not payload.exists(), seed
        assert time.perf_counter() - started < 2, seed
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


def test_some_mutated_directories(tmp_path: Path) -> None:
    """A sample for every run; both ends occur."""
    outcomes = run(tmp_path, range(300))
    assert {"loaded", "INVALID_ADAPTER", "UNSUPPORTED_ADAPTER"} <= outcomes.keys()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_thousand_mutated_directories(tmp_path: Path) -> None:
    """The whole campaign."""
    assert sum(run(tmp_path, range(1000, 21_000)).values()) == 20_000
