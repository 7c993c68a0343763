"""What the execution room needs to know; the engine fills it from its own settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """One device's model, cache and adapter memory.

    `num_blocks` or `kv_cache_bytes` sizes the key-value cache; with neither it is derived from free memory.
    `arena_bytes` and `host_pool_bytes` None are derived too. `max_context_tokens` None is the model's own, or
    what the cache can hold if that is less. `gpu_memory_utilization` is the share of a GPU's memory that may
    be in use, by others too. `num_threads` None takes all cores but one. `num_slots` adapters may be active
    at once.

    Decode steps are brought to `graph_batch_sizes` requests, steps with prompts to `graph_token_counts`
    tokens (None: ladders up to `max_running_requests` and `max_step_tokens` on a GPU, nothing on a CPU), and
    each is one captured graph on a GPU, unless `cuda_graphs` is off. On a CPU the same fixed buffers are used
    without graphs. `lora_overlap` runs the LoRA of decode steps of fixed shapes on a second stream beside the
    base's ops (on a CPU after them); None: as far as that was measured to be faster. `quantization` "fp8"
    quantises weights while they are read. `kv_cache_dtype` "fp8" caches keys and values in e4m3 with the
    checkpoint's scales, "auto" in `dtype`. Without `tile_tables` kernels take the tiles of a device that was
    never measured; that is of the whole process.
    """

    model_dir: str
    device: str = "cpu"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_tokens: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    max_step_tokens: int = 2048
    max_running_requests: int = 64
    max_context_tokens: int | None = None
    max_rank: int = 128
    num_slots: int = 16
    arena_bytes: int | None = None
    host_pool_bytes: int | None = None
    batch_invariant: bool = False
    num_threads: int | None = None
    load_format: str = "auto"
    quantization: str | None = None
    gpu_memory_utilization: float = 0.92
    cuda_graphs: bool = True
    graph_batch_sizes: tuple[int, ...] | None = None
    graph_token_counts: tuple[int, ...] | None = None
    lora_overlap: bool | None = None
    tile_tables: bool = True
