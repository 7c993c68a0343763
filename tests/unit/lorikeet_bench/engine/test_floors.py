"""Floors by arithmetic on paper, from the released models' sizes."""

import json
from pathlib import Path

import pytest
import torch

from lorikeet_bench.engine.floors import FloorModel
from lorikeet_bench.load.generated_adapters import AdapterShape
from lorikeet_bench.model_shape import shape_config

# gpt-oss-20b: 24 layers, H = I = 2880, 32 experts top-4, 64 query and 8 key-value heads of 64.
EXPERT = 3 * 2880 * 2880 * 17 / 32 + 2 * 3 * 2880  # and biases
ATTENTION = 2 * (2881 * (64 + 8 + 8) * 64 + (64 * 64 + 1) * 2880)
ROUTER = 2 * 2881 * 32
HEAD = 2 * 201_088 * 2880
PAIR = 2 * 32 * (2880 + 5760 + 2880 + 2880)
DENSE_ADAPTER = 2 * 32 * ((2880 + 4096) + 2 * (2880 + 512) + (4096 + 2880))
TOKEN = 2 * 2 * 8 * 64


@pytest.fixture
def gpt_oss(tmp_path: Path) -> FloorModel:
    """The released shape with rank-32 adapters on attention and experts."""
    (tmp_path / "config.json").write_text(json.dumps(shape_config("gpt-oss-20b")))
    return FloorModel.read(tmp_path, torch.bfloat16, AdapterShape())


def test_one_stream_reads_four_experts(gpt_oss: FloorModel) -> None:
    """Windowed layers keep 128 tokens in sight, full ones all."""
    found = gpt_oss.decode(1, 8, 1900)
    assert found.dense == 24 * (ATTENTION + ROUTER)
    assert found.experts == pytest.approx(24 * 4 * EXPERT)
    assert found.lm_head == HEAD
    assert found.adapters == pytest.approx(24 * (4 * PAIR + DENSE_ADAPTER))
    assert found.kv_cache == 12 * TOKEN * (1900 + 128)
    assert found.total == pytest.approx(3.9e9, rel=0.01)
    assert found.seconds == pytest.approx(0.9e-3, rel=0.01)


def test_many_streams_read_what_even_routing_reads(gpt_oss: FloorModel) -> None:
    """32 streams over 8 adapters: four tokens each."""
    found = gpt_oss.decode(32, 8, 1900)
    assert found.experts == pytest.approx(24 * 32 * (1 - (7 / 8) ** 32) * EXPERT)
    assert found.adapters == pytest.approx(24 * 8 * (32 * (1 - (7 / 8) ** 4) * PAIR + DENSE_ADAPTER))
    assert found.total == pytest.approx(16.6e9, rel=0.01)
    base = gpt_oss.decode(32, 0, 1900)
    assert base.adapters == 0
    assert base.total / found.total == pytest.approx(0.84, abs=0.01)
    assert gpt_oss.decode(32, 64, 1900) == gpt_oss.decode(32, 32, 1900)
    assert sum(found.by_part().values()) == pytest.approx(found.seconds)


def test_a_prompt_is_multiplications(gpt_oss: FloorModel) -> None:
    """Projections, four experts a token, and attention's triangle or band."""
    tokens = 1600
    weights = 2 * tokens * 24 * ((ATTENTION + ROUTER) / 2 + 4 * 3 * 2880 * 2880)
    full, band = tokens**2 / 2, 128 * tokens - 128**2 / 2
    attention = 4 * 64 * 64 * 12 * (full + band)
    assert gpt_oss.prefill_s(tokens) == pytest.approx((weights + attention) / 790e12, rel=1e-4)
    assert gpt_oss.prefill_s(tokens, 3) == pytest.approx(3 * gpt_oss.prefill_s(tokens))
    assert gpt_oss.closed_loop_ttft_s(3, tokens) == pytest.approx(2 * gpt_oss.prefill_s(tokens))
    step_s = gpt_oss.decode(32, 8, 1900).seconds
    whole_s = 32 * gpt_oss.prefill_s(tokens) + 600 * step_s
    assert gpt_oss.closed_loop_tokens_per_s(32, 8, tokens, 600) == pytest.approx(32 * 600 / whole_s)


def test_a_short_prompt_reads_its_experts(tmp_path: Path) -> None:
    """Of Qwen3-30B-A3B, 128 experts of three matrices [768, 2048], 100 tokens read 128 (1 - (15/16)^100)."""
    (tmp_path / "config.json").write_text(json.dumps(shape_config("qwen3-30b-a3b")))
    model = FloorModel.read(tmp_path, torch.bfloat16, AdapterShape())
    experts = 48 * 128 * (1 - (15 / 16) ** 100) * 3 * 768 * 2048 * 2
    others = 48 * 2 * 2048 * (2 * 4096 + 2 * 512 + 128)  # q, o, k, v, router
    attention = 48 * 4 * 100**2 / 2 * 4096 / 790e12
    assert model.prefill_s(100) == pytest.approx((experts + others) / 4.3e12 + attention, rel=1e-3)
    # a second prompt finds most of them read already
    assert model.prefill_s(100, 2) < 1.01 * model.prefill_s(200)
    assert model.closed_loop_ttft_s(2, 100) == pytest.approx(
        (model.prefill_s(100) + model.prefill_s(100, 2)) / 2
    )
