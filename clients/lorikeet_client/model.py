"""Values that describe what a node serves."""

from dataclasses import dataclass

from lorikeet_contract.schema import LoraSchema


@dataclass(frozen=True, slots=True)
class Limits:
    """The node's limits; a request beyond one is refused with its name."""

    max_context_tokens: int
    max_running_requests: int
    max_waiting_requests: int
    max_step_tokens: int
    max_top_logprobs: int
    max_stop_strings: int
    max_rank: int
    max_active_adapters: int
    adapter_arena_bytes: int
    host_pool_bytes: int
    max_samples: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The engine's counters at the time of the call."""

    running_requests: int
    waiting_requests: int
    kv_blocks_total: int
    kv_blocks_available: int
    adapter_leases: int
    active_adapters: int
    host_adapters: int
    arena_used_bytes: int
    host_used_bytes: int
    steps: int
    preemptions: int
    adapter_loads: int
    adapter_evictions: int
    prefix_hit_tokens: int
    compilations: int


@dataclass(frozen=True, slots=True)
class Model:
    """The base model. `instance_id` changes when the service restarts."""

    name: str
    architecture: str
    instance_id: str
    base_digest: str
    dtype: str
    vocab_size: int
    limits: Limits
    lora_schema: LoraSchema
    status: EngineStatus
