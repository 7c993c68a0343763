"""Settings of the inference service: environment variables INFERENCE_..., or flags of the same names.

`--model-dir DIR` is INFERENCE_MODEL_DIR. Flags win over the environment. Read once, by `__main__`; frozen;
`server.py` hands each room its own small dataclass, and nothing else reads the environment.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import DirectoryPath, Field, FilePath, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from inference_service.engine.config import EngineConfig
from lorikeet_contract.names import check_segment
from lorikeet_rpc.metrics_endpoint import split_address
from lorikeet_rpc.server import DEFAULT_MAX_MESSAGE_BYTES, TlsFiles
from lorikeet_rpc.service_settings import read_service_settings

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

# Longer than any step: on a CPU, where auto may end, one of a large model takes minutes.
_STALL_TIMEOUT_S = {"cuda": 60.0, "cpu": 600.0, "auto": 600.0}


class Settings(BaseSettings):
    """Serves a model and its LoRA adapters over gRPC. Each flag is also a variable INFERENCE_<FLAG>."""

    model_config = SettingsConfigDict(
        env_prefix="INFERENCE_",
        frozen=True,
        extra="forbid",
        cli_prog_name="lorikeet-inference",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        protected_namespaces=(),
    )

    model_dir: DirectoryPath = Field(description="Hugging Face directory of the base model.")
    listen: str = Field("127.0.0.1:50051", description="host:port or unix:/path; port 0 picks one.")
    insecure_listen: bool = Field(default=False, description="Allow plain text beyond loopback.")
    tls_cert: FilePath | None = Field(None, description="PEM certificate chain of this server.")
    tls_key: FilePath | None = Field(None, description="PEM key of tls_cert.")
    tls_client_ca: FilePath | None = Field(None, description="Ask clients for a certificate of this CA.")
    metrics_listen: str | None = Field(None, description="host:port of Prometheus metrics; off without.")
    metrics_adapter_names: bool = Field(
        default=True, description="Name adapters in the series for routers; else digests stand there."
    )
    node_token: SecretStr | None = Field(None, description="Shared secret of the adapter manager.")
    model_name: str = Field("", description="Name shown to clients; default: the directory's.")
    static_tenants: dict[str, SecretStr] = Field(
        {},
        description='Tenants known without a manager, as JSON: {"demo": "<token>"}. For benches and tests.',
    )
    data_dir: Path = Field(Path("var/inference"), description="Where the disk cache of adapters lies.")
    max_message_bytes: Count = Field(
        DEFAULT_MAX_MESSAGE_BYTES, description="Largest request message. Replies stay below 4 MiB."
    )
    drain_grace_s: Seconds = Field(30.0, description="How long running requests may take after SIGTERM.")
    log_format: Literal["json", "console"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where torch sees a GPU.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Compute dtype; auto: the checkpoint's on a GPU, float32 on a CPU."
    )
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: random weights, for benches.")
    quantization: Literal["fp8"] | None = Field(
        None, description="fp8: quantise the weights of a 16- or 32-bit checkpoint while they are read."
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = Field(
        "auto", description="fp8: keys and values in e4m3 with the checkpoint's scales, or 1; auto: in dtype."
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto", description="auto: generation_config.json gives defaults for sampling; none: it does not."
    )
    block_tokens: Count = Field(16, description="Tokens of a key-value block.")
    num_blocks: Count | None = Field(None, description="Key-value blocks; default: what memory allows.")
    kv_cache_bytes: Count | None = Field(None, description="Size of the key-value cache, instead.")
    max_step_tokens: Count = Field(2048, description="Token budget of a step.")
    max_running_requests: Count = 64
    max_waiting_requests: Count = 1024
    max_context_tokens: Count | None = Field(None, description="Default: the model's own.")
    max_top_logprobs: Annotated[int, Field(ge=0)] = 20
    max_stop_strings: Annotated[int, Field(ge=0)] = 16
    max_samples: Count = Field(64, description="Most samples of one request (n).")
    max_rank: Count = Field(128, description="Largest LoRA rank of a site.")
    max_active_adapters: Count = Field(16, description="Adapters that one batch may mix.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.92, description="Share of a GPU's memory for everything, what others use included."
    )
    adapter_arena_bytes: Count = Field(1 << 30, description="Device memory for adapters.")
    host_pool_bytes: Count = Field(4 << 30, description="Host memory for adapters.")
    disk_cache_bytes: Count = Field(64 << 30, description="Disk cache for adapters, in data_dir.")
    prefix_cache: bool = Field(default=True, description="Share key-value blocks of equal prefixes.")
    batch_invariant: bool = Field(
        default=False,
        description="Base projections and experts sum alike in any batch; not LoRA, nor attention on a GPU.",
    )
    overlap: bool | None = Field(
        None, description="Schedule a step while the one before runs; default: on a GPU, not on a CPU."
    )
    cuda_graphs: bool = Field(default=True, description="Replay steps as captured graphs on a GPU.")
    graph_batch_sizes: str | None = Field(
        None, description="Requests of captured decode steps, or none; default: 1,2,4,8,16,24 and so on."
    )
    graph_token_counts: str | None = Field(
        None, description="Tokens of captured steps with prompts, or none; default: 64,128,192 and so on."
    )
    lora_overlap: bool | None = Field(
        None,
        description="LoRA of decode steps on a second stream; default: where measured to be faster.",
    )
    tile_tables: bool = Field(
        default=True, description="Kernels' tiles as measured on this GPU; without, by the rules alone."
    )
    num_threads: Count | None = Field(None, description="CPU threads of the engine; default: cores - 1.")
    num_load_threads: Count = Field(2, description="Threads that read and verify adapters.")
    max_adapter_wait_s: Seconds = Field(120.0, description="Longest wait of a request for its adapter.")
    slot_patience_s: Seconds = Field(0.5, description="Wait after which a busy slot is freed for others.")
    start_timeout_s: Seconds = Field(600.0, description="Longest time to load the model.")
    stall_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="A silent engine is killed and restarted after this; default: 60 on cuda, else 600.",
    )

    @field_validator("metrics_listen")
    @classmethod
    def _check_metrics_listen(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value

    @field_validator("graph_batch_sizes", "graph_token_counts")
    @classmethod
    def _check_sizes(cls, value: str | None) -> str | None:
        _read_sizes(value)
        return value

    @model_validator(mode="after")
    def _belong_together(self) -> "Settings":
        TlsFiles.from_settings(self.tls_cert, self.tls_key, self.tls_client_ca)
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ValueError("num_blocks and kv_cache_bytes both size the key-value cache: give one")
        for tenant in self.static_tenants:
            check_segment(tenant, "static_tenants: tenant")
        return self

    @property
    def tls(self) -> TlsFiles | None:
        """The server's TLS files, if any."""
        return TlsFiles.from_settings(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def cache_dir(self) -> Path:
        """The disk cache of adapter payloads."""
        return self.data_dir.absolute() / "adapters"

    def engine_config(self) -> EngineConfig:
        """The engine process's own settings."""
        return EngineConfig(
            model_dir=str(self.model_dir.absolute()),
            model_name=self.model_name,
            device=self.device,
            dtype=self.dtype,
            load_format=self.load_format,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            block_tokens=self.block_tokens,
            num_blocks=self.num_blocks,
            kv_cache_bytes=self.kv_cache_bytes,
            max_step_tokens=self.max_step_tokens,
            max_running_requests=self.max_running_requests,
            max_waiting_requests=self.max_waiting_requests,
            max_context_tokens=self.max_context_tokens,
            max_top_logprobs=self.max_top_logprobs,
            max_stop_strings=self.max_stop_strings,
            max_samples=self.max_samples,
            max_rank=self.max_rank,
            max_active_adapters=self.max_active_adapters,
            gpu_memory_utilization=self.gpu_memory_utilization,
            arena_bytes=self.adapter_arena_bytes,
            host_pool_bytes=self.host_pool_bytes,
            disk_cache_dir=str(self.cache_dir),
            disk_cache_bytes=self.disk_cache_bytes,
            prefix_cache=self.prefix_cache,
            batch_invariant=self.batch_invariant,
            overlap=self.overlap,
            cuda_graphs=self.cuda_graphs,
            graph_batch_sizes=_read_sizes(self.graph_batch_sizes),
            graph_token_counts=_read_sizes(self.graph_token_counts),
            lora_overlap=self.lora_overlap,
            tile_tables=self.tile_tables,
            num_threads=self.num_threads,
            num_load_threads=self.num_load_threads,
            max_adapter_wait_s=self.max_adapter_wait_s,
            slot_patience_s=self.slot_patience_s,
            start_timeout_s=self.start_timeout_s,
            stall_timeout_s=self.stall_timeout_s or _STALL_TIMEOUT_S[self.device],
            log_json=self.log_format == "json",
            log_level=self.log_level,
        )


def _read_sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if text.strip() == "none":
        return ()
    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isascii() and size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(
            f"{text!r} is no list of sizes; write numbers above 0 with commas, such as 1,2,4,8, or none"
        )
    return tuple(sorted({int(size) for size in sizes}))


def read_settings(arguments: Sequence[str]) -> Settings:
    """Read flags, then environment, then defaults; raises InvalidSettingsError where one is wrong."""
    return read_service_settings(Settings, arguments)
