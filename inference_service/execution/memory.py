"""How a device's memory is shared out between all that lives there, before anything is allocated."""

from dataclasses import dataclass

import psutil
import torch

from inference_service.execution.config import BackendConfig
from inference_service.execution.kv_cache import block_bytes, cache_dtype
from inference_service.execution.step_shapes import graph_sizes
from inference_service.models import (
    ModelDescription,
    ModelError,
    activation_bytes,
    lora_workspace_bytes,
    parameter_bytes,
)

# On a CPU the memory is shared with everybody else: what nobody asked for stays modest.
_CPU_CACHE_BYTES = 1 << 30
_ARENA_BYTES = 1 << 30
_HOST_POOL_BYTES = 4 << 30
_CPU_SHARE = 0.8  # of what is free
_HOST_SHARE = 0.9  # of what is free may be page-locked
# Kernels' code, libraries' own buffers, and what torch's allocator cannot hand out for being in pieces.
_GPU_LIBRARIES_BYTES = 768 << 20
# A captured graph's own nodes and arguments, a few hundred kernels.
_GRAPH_BYTES = 8 << 20
# Rows of prompt log-probabilities that are computed at a time, beside those that are sampled from.
_PROMPT_ROWS = 64


class MemoryBudgetError(ModelError):
    """Weights, cache and adapters do not fit the device as configured."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What one process may plan with: `total_bytes` of the device, `free_bytes` of them not in use yet."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A share of the device's memory, and the setting that makes it smaller."""

    name: str
    num_bytes: int
    setting: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes that fit together. `parts` add up to what will be used of `budget_bytes`."""

    num_blocks: int
    max_context_tokens: int
    arena_bytes: int
    host_pool_bytes: int
    budget_bytes: int
    parts: tuple[MemoryPart, ...]

    @property
    def used_bytes(self) -> int:
        """Of all parts."""
        return sum(part.num_bytes for part in self.parts)

    def fields(self) -> dict[str, int]:
        """For one line of the log: each part's bytes by its name."""
        parts = {
            f"{part.name.replace(' ', '_').replace('-', '_')}_bytes": part.num_bytes for part in self.parts
        }
        return {
            "budget_bytes": self.budget_bytes,
            **parts,
            "unused_bytes": self.budget_bytes - self.used_bytes,
        }


def device_memory(device: torch.device) -> DeviceMemory:
    """As it is now. On a CPU a fixed share of what is available, for it is not ours alone."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total, free)
    available = int(psutil.virtual_memory().available * _CPU_SHARE)
    return DeviceMemory(available, available)


def check_host_pool(plan: MemoryPlan, available: int | None = None) -> None:
    """Refuse a host pool that cannot be page-locked without taking the machine's last memory.

    Raises:
        MemoryBudgetError: it is larger than nine tenths of the memory that is available.
    """
    available = psutil.virtual_memory().available if available is None else available
    if plan.host_pool_bytes > available * _HOST_SHARE:
        raise MemoryBudgetError(
            f"host_pool_bytes is {_mib(plan.host_pool_bytes)}, which would be page-locked, and "
            f"{_mib(available)} of host memory are available; lower it to at most "
            f"{_mib(int(available * _HOST_SHARE))}"
        )


def plan_memory(
    config: BackendConfig,
    description: ModelDescription,
    dtype: torch.dtype,
    device: torch.device,
    memory: DeviceMemory,
) -> MemoryPlan:
    """Fill in the sizes that `config` leaves open.

    Raises:
        MemoryBudgetError: it cannot fit; the message gives every part and the setting that makes it smaller.
        ModelConfigError: the cache cannot be of the dtype that is wanted.
    """
    spec = description.spec
    budget = _budget(config, device, memory)
    parts = _fixed_parts(config, description, dtype, device)
    arena = next(part.num_bytes for part in parts if part.setting == "adapter_arena_bytes")
    attentions = [layer.attention for layer in spec.layers]
    cached = cache_dtype(config.kv_cache_dtype, attentions, dtype, device)
    per_block = block_bytes(attentions, config.block_tokens, cached)
    left = budget - sum(part.num_bytes for part in parts)
    num_blocks = _num_blocks(config, spec.max_position, per_block, left, device)
    # One block more takes the rows that only fill a batch up.
    cache = MemoryPart("key-value cache", (num_blocks + 1) * per_block, _cache_setting(config))
    if num_blocks < 1 or cache.num_bytes > left:
        raise MemoryBudgetError(_refusal(config, device, budget, memory, (*parts, cache), left))
    return MemoryPlan(
        num_blocks=num_blocks,
        max_context_tokens=_max_context(config, spec.max_position, num_blocks),
        arena_bytes=arena,
        host_pool_bytes=_HOST_POOL_BYTES if config.host_pool_bytes is None else config.host_pool_bytes,
        budget_bytes=budget,
        parts=(*parts, cache),
    )


def _budget(config: BackendConfig, device: torch.device, memory: DeviceMemory) -> int:
    if device.type == "cpu":
        return memory.free_bytes
    # As vLLM counts: a share of the whole device, of which others' memory is taken off.
    return int(memory.total_bytes * config.gpu_memory_utilization) - (memory.total_bytes - memory.free_bytes)


def _fixed_parts(
    config: BackendConfig, description: ModelDescription, dtype: torch.dtype, device: torch.device
) -> tuple[MemoryPart, ...]:
    """All but the key-value cache, which takes what they leave."""
    spec, itemsize = description.spec, dtype.itemsize
    rows = config.max_running_requests
    step_tokens = max(config.max_step_tokens, rows)
    # Logits, a float32 copy to change, and what a sort of them takes: values and indices.
    sampling = (rows + _PROMPT_ROWS) * spec.vocab_size * (itemsize + 4 + 4 + 8)
    arena = _ARENA_BYTES if config.arena_bytes is None else config.arena_bytes
    parts = (
        MemoryPart("weights", parameter_bytes(spec, dtype), "dtype"),
        MemoryPart("adapter arena", arena, "adapter_arena_bytes"),
        MemoryPart("lora workspaces", _lora_workspaces(config, description, device), "max_rank"),
        MemoryPart(
            "activations", activation_bytes(spec, step_tokens, itemsize, config.max_rank), "max_step_tokens"
        ),
        MemoryPart("sampling", sampling, "max_running_requests"),
        # A count for every place of the request table and token, made when the first request has penalties.
        MemoryPart("penalty counts", 4 * rows * spec.vocab_size, "max_running_requests"),
    )
    if device.type == "cpu":
        return parts
    return (
        *parts,
        MemoryPart("cuda graphs", _graphs(config, description, itemsize, device), "cuda_graphs"),
        MemoryPart("libraries", _GPU_LIBRARIES_BYTES, "gpu_memory_utilization"),
    )


def _lora_workspaces(config: BackendConfig, description: ModelDescription, device: torch.device) -> int:
    # The references on a CPU keep none.
    return 0 if device.type == "cpu" else lora_workspace_bytes(description.spec, config.max_rank)


def _graphs(config: BackendConfig, description: ModelDescription, itemsize: int, device: torch.device) -> int:
    """The graphs' own memory, and the activations of the largest one that they share."""
    sizes, counts = graph_sizes(config, device)
    if not sizes and not counts:
        return 0
    shared = activation_bytes(description.spec, max((*sizes, *counts)), itemsize, config.max_rank)
    return 2 * (len(sizes) + len(counts)) * _GRAPH_BYTES + shared  # with adapters and without


def _refusal(
    config: BackendConfig,
    device: torch.device,
    budget: int,
    memory: DeviceMemory,
    parts: tuple[MemoryPart, ...],
    left: int,
) -> str:
    shares = ", ".join(f"{part.name} {_mib(part.num_bytes)} ({part.setting})" for part in parts)
    whole = f"{device} has {_mib(max(budget, 0))} to plan with"
    if device.type != "cpu":
        whole += (
            f" (gpu_memory_utilization {config.gpu_memory_utilization:g} of {_mib(memory.total_bytes)}, of "
            f"which {_mib(memory.total_bytes - memory.free_bytes)} are in use by others)"
        )
    return (
        f"{whole}, and that is too little: {shares}. All but the cache leave {_mib(max(left, 0))} for it. "
        "Lower a setting that stands beside a large part, or serve a smaller or packed model"
    )


def _cache_setting(config: BackendConfig) -> str:
    return "num_blocks" if config.num_blocks is not None else "kv_cache_bytes"


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
    return max(0, min(room // per_block - 1, config.max_running_requests * per_request))


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
