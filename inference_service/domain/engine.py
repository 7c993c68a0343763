"""What the engine says of itself."""

from dataclasses import dataclass

from inference_service.domain.start_phases import PhaseSeconds


class BackendUnusableError(Exception):
    """The backend cannot be built as configured: model, device or memory. The message says all."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Fixed at start-up, shown by GetModel."""

    max_context_tokens: int
    max_running_requests: int
    max_waiting_requests: int
    max_step_tokens: int
    max_top_logprobs: int
    max_stop_strings: int
    max_samples: int
    max_rank: int
    max_active_adapters: int
    adapter_arena_bytes: int
    host_pool_bytes: int
    block_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The loaded model, sent once when the engine is ready. `lora_schema` is the schema's canonical JSON.

    `start_phases` are seconds of the process's way to being ready; some ran side by side.
    """

    model_name: str
    architecture: str
    base_digest: str
    dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    limits: EngineLimits
    lora_schema: bytes
    start_phases: PhaseSeconds = ()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a backend knows once its model is loaded and its memory is divided; see EngineInfo."""

    model_name: str
    architecture: str
    base_digest: str
    dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    lora_schema: bytes
    max_context_tokens: int
    num_blocks: int
    start_phases: PhaseSeconds = ()  # of the backend's share of the start


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Counters; after every scenario the first seven must return to what they were."""

    running_requests: int = 0
    waiting_requests: int = 0
    kv_blocks_total: int = 0
    kv_blocks_available: int = 0
    adapter_leases: int = 0
    active_adapters: int = 0
    host_adapters: int = 0
    arena_used_bytes: int = 0
    host_used_bytes: int = 0
    steps: int = 0
    preemptions: int = 0
    adapter_loads: int = 0
    adapter_evictions: int = 0
    prefix_hit_tokens: int = 0
    compilations: int = 0
