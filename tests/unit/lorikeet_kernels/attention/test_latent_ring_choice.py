"""Which caches and devices the ring of TMA copies takes; no GPU."""

# pyright: reportPrivateUsage=false

import pytest
import torch

from lorikeet_kernels.attention.latent_ring_kernels import can_ring
from lorikeet_kernels.launch import hopper
from lorikeet_kernels.tiling.latent_tiles import SHARED_BYTES, most_ring_bytes

BF16 = torch.bfloat16


def rings(
    latent: int, rope: int, dtype: torch.dtype = BF16, q_dtype: torch.dtype = BF16, *, on_hopper: bool = True
) -> bool:
    """Of a cache of pages of 16 tokens."""
    cache = torch.empty(2, 16, 1, latent + rope, dtype=dtype)
    return can_ring(cache, latent, q_dtype, on_hopper=on_hopper)


def test_only_hopper() -> None:
    """Elsewhere the compiler ends the process."""
    assert rings(512, 64)
    assert not rings(512, 64, on_hopper=False)


def test_what_fits_the_shared_memory_with_any_number_of_rows() -> None:
    """The widest latents with the widest keys do not, of 64 rows: 238,652 bytes as compiled."""
    assert rings(256, 128)
    assert most_ring_bytes(512, 640) >= 238_652 > SHARED_BYTES
    assert not rings(512, 128)


def test_queries_are_as_the_cache() -> None:
    """A product's operands have one type; others go through Triton's pipeline."""
    assert rings(128, 64, torch.float16, torch.float16)
    assert not rings(128, 64, torch.float16, BF16)
    assert not rings(128, 64, torch.float32, torch.float32)


@pytest.mark.parametrize(("major", "is_one"), [(8, False), (9, True), (10, False), (12, False)])
def test_hopper_is_one_generation(monkeypatch: pytest.MonkeyPatch, major: int, is_one: bool) -> None:
    """Neither before nor after it; where there is no GPU the interpreter plays it."""

    class OnGpu:
        device = torch.device("cuda", 0)

        def get_device(self) -> int:
            return 0

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _index: (major, 0))  # pyright: ignore[reportUnknownLambdaType]
    hopper._major_of.cache_clear()
    assert hopper.is_hopper(OnGpu()) == is_one  # pyright: ignore[reportArgumentType]
    hopper._major_of.cache_clear()
    assert hopper.is_hopper(torch.empty(0))
