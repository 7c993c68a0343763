"""Parallel reading: every bit as safetensors' own reader has it, little memory beside the parameters."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from inference_service.models import CheckpointError, describe_model
from inference_service.models import weight_reader as weight_reader_module
from inference_service.models.checkpoint import Checkpoint
from inference_service.models.finite import is_finite
from inference_service.models.stored_tensors import stored_tensors
from inference_service.models.weight_reader import pieces
from tests.support.tiny_gpt_oss import CONFIG as GPT_OSS
from tests.support.tiny_gpt_oss import QUANTIZATION, pack_experts, write_gpt_oss
from tests.support.tiny_gpt_oss import make_weights as make_gpt_oss_weights
from tests.support.tiny_model import CONFIG, make_weights, write_model

PACKED = GPT_OSS | {"intermediate_size": 64, "quantization_config": QUANTIZATION}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Loads a model in a process of its own ; prints by how much its memory grew at most, and the file's size.
PEAK = """
import resource, sys, torch
from pathlib import Path
from inference_service.models import describe_model, load_model
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
description = describe_model(Path(sys.argv[1]))
before = peak()
load_model(description, dtype=torch.bfloat16, device=torch.device("cpu"), num_positions=8)
print(peak() - before, Path(sys.argv[1], "model.safetensors").stat().st_size)
"""


def read(path: Path, wanted: dict[str, torch.Tensor], transposed: tuple[str, ...] = ()) -> None:
    """Fill the tensors by their names."""
    checkpoint = Checkpoint(path)
    try:
        for name, destination in wanted.items():
            checkpoint.read_into(destination, name, transpose=name in transposed)
        checkpoint.finish()
    finally:
        checkpoint.close()


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("piece_bytes", [64, 256, 16 << 20])
def test_every_bit_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, piece_bytes: int
) -> None:
    """Of any shape, dtype and direction, in one piece or many, into whole parameters and into views."""
    monkeypatch.setattr(weight_reader_module, "PIECE_BYTES", piece_bytes)
    shapes = {
        "vector": (77,),
        "matrix": (13, 31),
        "experts": (3, 7, 16),
        "blocks": (2, 5, 3, 16),
        "one": (1,),
    }
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator).to(stored) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    expected = load_file(tmp_path / "model.safetensors")
    for dtype in FLOATS:
        wanted = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        wanted["experts"] = torch.empty(3, 16, 7, dtype=dtype)
        wanted["matrix"] = torch.empty(40, 31, dtype=dtype)[20:33]
        read(tmp_path, wanted, transposed=("experts",))
        for name, found in wanted.items():
            reference = expected[name].transpose(-1, -2) if name == "experts" else expected[name]
            assert torch.equal(found, reference.to(dtype)), (name, dtype)


def test_bytes_arrive_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights."""
    monkeypatch.setattr(weight_reader_module, "PIECE_BYTES", 100)
    packed = torch.arange(999).to(torch.uint8)
    save_file({"packed": packed}, tmp_path / "model.safetensors")
    found = torch.empty(999, dtype=torch.uint8)
    read(tmp_path, {"packed": found})
    assert torch.equal(found, packed)


def test_pieces_make_up_the_tensor() -> None:
    """In row-major order, views of it, none larger than asked for."""
    for tensor in (
        torch.arange(60),
        torch.arange(60).view(3, 20),
        torch.arange(60).view(3, 4, 5).transpose(1, 2),
    ):
        for size in (1, 7, 20, 1000):
            parts = pieces(tensor, size)
            assert all(part.numel() <= size for part in parts)
            assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), tensor.reshape(-1))
            for part in parts:
                assert part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert pieces(torch.empty(0, 5), 3) == []


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_value_is_found(dtype: torch.dtype, value: float) -> None:
    """Whatever its sign and place; the largest numbers are fine."""
    limits = torch.finfo(dtype)
    numbers = torch.tensor([0.0, -0.0, limits.max, limits.min, limits.tiny], dtype=dtype)
    assert is_finite(numbers)
    assert is_finite(numbers[:0])
    for place in range(5):
        bad = numbers.clone()
        bad[place] = value
        assert not is_finite(bad)
        assert not is_finite(-bad)
        assert not is_finite(bad.expand(2, -1))


def test_a_file_cut_short_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """By name, not by a crash: a mapping would end the process."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1 << 16)}, path)
    checkpoint = Checkpoint(tmp_path)
    with path.open("r+b") as file:
        file.truncate(4096)
    checkpoint.read_into(torch.empty(1 << 16), "a")
    with pytest.raises(CheckpointError, match=r"model\.safetensors was cut short while it was read"):
        checkpoint.finish()
    checkpoint.close()


@pytest.mark.long
def test_no_second_copy_of_the_model_is_held(tmp_path: Path) -> None:
    """What a load takes at most is the weights, and some buffers."""
    write_model(tmp_path, {}, vocab_size=120_000, hidden_size=512)
    shapes = {name: value.shape for name, value in make_weights({**CONFIG, "hidden_size": 512}).items()}
    outside = ("model.embed_tokens.weight", "lm_head.weight")
    shapes |= dict.fromkeys(outside, (120_000, 512))
    save_file(
        {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    grown, stored = map(
        int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    )
    assert stored > 200 << 20
    assert grown < 1.25 * stored + (32 << 20)


def test_a_models_tensors_are_known_without_its_checkpoint(tmp_path: Path) -> None:
    """By name and shape, as the released files have them, packed or not."""
    weights = pack_experts(make_gpt_oss_weights(PACKED))
    path = write_gpt_oss(tmp_path / "a", weights, **PACKED)
    found = stored_tensors(describe_model(path).spec)
    assert {name: of.shape for name, of in found.items()} == {n: w.shape for n, w in weights.items()}
    assert all(of.is_packed == (weights[name].dtype == np.uint8) for name, of in found.items())
    plain = make_weights(CONFIG)
    spec = describe_model(write_model(tmp_path / "b", {})).spec
    assert {name: of.shape for name, of in stored_tensors(spec).items()} == {
        n: w.shape for n, w in plain.items()
    }
