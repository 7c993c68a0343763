"""The engine process's own settings; `server.py` makes them of the service's settings."""

from dataclasses import dataclass

DEFAULT_BACKEND_FACTORY = "inference_service.execution.backend:load_backend"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine process needs to start. Values were checked at the edge.

    One of `num_blocks` and `kv_cache_bytes` sizes the key-value cache; with neither the backend chooses.
    `max_context_tokens` None takes the model's own. `backend_factory` is "module:function", BackendConfig
    to Backend, for tests and for backends that live outside this tree.

    An adapter wait ends in failure after `max_adapter_wait_s`. Once it is longer than `slot_patience_s` with
    every slot busy, the slot that was activated first takes no new requests, so that it falls idle.
    A failed load is tried again at the earliest after `load_retry_s`, doubled with each failure in a row.
    With `overlap` a step is launched before the one before it was collected; None: where the backend has a
    device that works by itself. `cuda_graphs`, `graph_batch_sizes`,
    `graph_token_counts`, `lora_overlap` and `tile_tables` are the backend's.
    A process that says nothing for `stall_timeout_s`, though asked, is killed and started again: longer than
    any step takes.
    """

    model_dir: str
    disk_cache_dir: str
    model_name: str = ""
    device: str = "cpu"
    dtype: str = "auto"
    load_format: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    block_tokens: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    max_step_tokens: int = 2048
    max_running_requests: int = 64
    max_waiting_requests: int = 1024
    max_context_tokens: int | None = None
    max_top_logprobs: int = 20
    max_stop_strings: int = 16
    max_samples: int = 64
    max_rank: int = 128
    max_active_adapters: int = 16
    gpu_memory_utilization: float = 0.92
    arena_bytes: int = 1 << 30
    host_pool_bytes: int = 4 << 30
    disk_cache_bytes: int = 64 << 30
    prefix_cache: bool = True
    batch_invariant: bool = False
    num_threads: int | None = None
    num_load_threads: int = 2
    overlap: bool | None = None
    cuda_graphs: bool = True
    graph_batch_sizes: tuple[int, ...] | None = None
    graph_token_counts: tuple[int, ...] | None = None
    lora_overlap: bool | None = None
    tile_tables: bool = True
    max_adapter_wait_s: float = 120.0
    slot_patience_s: float = 0.5
    load_retry_s: float = 5.0
    start_timeout_s: float = 600.0
    stall_timeout_s: float = 600.0
    log_json: bool = False
    log_level: str = "info"
    backend_factory: str = DEFAULT_BACKEND_FACTORY
