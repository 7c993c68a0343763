"""How memory is shared out between weights, key-value cache and adapters, before anything is allocated."""

from dataclasses import dataclass

import psutil
import torch

from inference_service.execution.config import BackendConfig
from inference_service.execution.kv_cache import block_bytes
from inference_service.models import ModelDescription, ModelError, parameter_bytes

# On a CPU the memory is shared with everybody else: what nobody asked for stays modest.
_CPU_CACHE_BYTES = 1 << 30
_ARENA_BYTES = 1 << 30
_HOST_POOL_BYTES = 4 << 30
_CPU_SHARE, _GPU_SHARE = 0.8, 0.92  # of what is free; the rest is for activations and the allocator's slack


class MemoryBudgetError(ModelError):
    """Weights, cache and adapters do not fit the device as configured."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes that fit together."""

    num_blocks: int
    max_context_tokens: int
    arena_bytes: int
    host_pool_bytes: int


def free_memory(device: torch.device) -> int:
    """Bytes that this process may plan with."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _GPU_SHARE)
    return int(psutil.virtual_memory().available * _CPU_SHARE)


def plan_memory(
    config: BackendConfig, description: ModelDescription, dtype: torch.dtype, device: torch.device, free: int
) -> MemoryPlan:
    """Fill in the sizes that `config` leaves open.

    Raises:
        MemoryBudgetError: it cannot fit; the message gives every part and the setting that makes it smaller.
    """
    spec = description.spec
    weights = parameter_bytes(spec, dtype)
    arena = _ARENA_BYTES if config.arena_bytes is None else config.arena_bytes
    per_block = block_bytes([layer.attention for layer in spec.layers], config.block_tokens, dtype)
    left = free - weights - arena
    num_blocks = _num_blocks(config, spec.max_position, per_block, left, device)
    needed = num_blocks * per_block
    if num_blocks < 1 or needed > left:
        raise MemoryBudgetError(
            f"{device} has {_mib(free)} to plan with; weights take {_mib(weights)}, the adapter arena "
            f"{_mib(arena)}, and {_mib(max(left, 0))} are left for the key-value cache, which needs "
            f"{_mib(max(needed, per_block))}; lower arena_bytes, num_blocks or kv_cache_bytes"
        )
    return MemoryPlan(
        num_blocks=num_blocks,
        max_context_tokens=_max_context(config, spec.max_position, num_blocks),
        arena_bytes=arena,
        host_pool_bytes=_HOST_POOL_BYTES if config.host_pool_bytes is None else config.host_pool_bytes,
    )


def _num_blocks(
    config: BackendConfig, max_position: int, per_block: int, left: int, device: torch.device
) -> int:
    if config.num_blocks is not None and config.kv_cache_bytes is not None:
        raise MemoryBudgetError(
            f"num_blocks {config.num_blocks} and kv_cache_bytes {config.kv_cache_bytes} both size the cache; "
            "give one"
        )
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes // per_block
    per_request = -(-(config.max_context_tokens or max_position) // config.block_tokens)
    room = left if device.type != "cpu" else min(left, _CPU_CACHE_BYTES)
    # More than every running request at full length is never used.
    return max(0, min(room // per_block, config.max_running_requests * per_request))


def _max_context(config: BackendConfig, max_position: int, num_blocks: int) -> int:
    capacity = num_blocks * config.block_tokens
    if config.max_context_tokens is None:
        return min(max_position, capacity)
    if config.max_context_tokens > max_position:
        raise MemoryBudgetError(
            f"max_context_tokens {config.max_context_tokens} is more than the model's "
            f"max_position_embeddings {max_position}"
        )
    if config.max_context_tokens > capacity:
        raise MemoryBudgetError(
            f"max_context_tokens {config.max_context_tokens} does not fit a cache of {num_blocks} blocks of "
            f"{config.block_tokens} tokens; lower it to {capacity} or give the cache more memory"
        )
    return config.max_context_tokens


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
