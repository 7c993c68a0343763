"""Builds everything that lives on one device. The engine process calls `load_backend` once."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from inference_service.domain.engine import ModelFacts
from inference_service.domain.start_phases import StartPhases
from inference_service.execution.adapter_layout import AdapterPlacer
from inference_service.execution.batch_builder import BatchBuilder
from inference_service.execution.compile_counter import CompileCounter
from inference_service.execution.config import BackendConfig
from inference_service.execution.device_arena import TensorArena
from inference_service.execution.forward_pass import ForwardPass
from inference_service.execution.host_memory import HostMemory, PageableMemory, pinned_memory
from inference_service.execution.host_pool import PinnedHostPool
from inference_service.execution.kv_cache import allocate_cache, cache_dtype
from inference_service.execution.memory import MemoryPlan, check_host_pool, device_memory, plan_memory
from inference_service.execution.model_runner import BatchModelRunner
from inference_service.execution.request_table import RequestTable
from inference_service.execution.sampler import TokenSampler
from inference_service.execution.step_buffers import StepBuffers, StepShape
from inference_service.execution.step_graphs import StepGraphs
from inference_service.execution.step_shapes import StepShapes, graph_sizes
from inference_service.execution.warm_up import StepLimits, warm_up
from inference_service.execution.warm_up_ops import check_heads
from inference_service.models import (
    LoadedModel,
    ModelConfigError,
    ModelDescription,
    compute_dtype,
    describe_model,
    load_model,
)
from inference_service.ports import DeviceArena, HostPool
from lorikeet_kernels.dense.linear import ROW_TILE
from lorikeet_kernels.tiling.lora_overlap import BesideRows, runs_beside
from lorikeet_kernels.tiling.measured import MEASURED

# Reading, hashing and scaling one revision, outside the interpreter's lock: sha256 keeps a core busy at about
# 1.5 GB/s, memory and disks are faster.
_MAX_READ_THREADS = 12
_STEPS_IN_FLIGHT = 2
# There wherever NVIDIA's driver is loaded.
_DRIVER = Path("/dev/nvidiactl")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class DeviceBackend:
    """The device as the engine sees it. Implements ports.Backend."""

    info: ModelFacts
    runner: BatchModelRunner
    host_pool: HostPool
    arena: DeviceArena
    compiled: CompileCounter | None = None  # None on a CPU: the references compile nothing

    def compilations(self) -> int:
        """See ports.Backend."""
        return 0 if self.compiled is None else self.compiled.since_ready()


def _default_threads() -> int:
    """All cores but one, or fewer where OMP_NUM_THREADS says so.

    The front end needs a core: threads that spin at OpenMP's barriers against it made a stream 5 to 30 times
    slower on two cores.
    """
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)) - 1))


def _read_threads() -> int:
    """All cores but those of the engine's and the front end's threads."""
    return max(2, min(_MAX_READ_THREADS, len(os.sched_getaffinity(0)) - 2))


def _host_memory(num_bytes: int, device: torch.device, phases: StartPhases) -> HostMemory:
    """Page-locking takes seconds: it runs beside the loading of the weights."""
    if device.type == "cpu":
        return PageableMemory()
    with phases.phase("host_pool"), torch.cuda.device(device):
        return pinned_memory(num_bytes)


def load_backend(config: BackendConfig) -> DeviceBackend:
    """Load the model and allocate cache, host pool and arena.

    A process whose backend on a GPU lives takes no other `tile_tables`: RuntimeError.

    Raises:
        ModelError: the model directory cannot be served, or does not fit the device; the message says why.
    """
    MEASURED.use(wanted=config.tile_tables)
    phases = StartPhases()
    with phases.phase("device"):
        device = _device(config.device)
        memory = device_memory(device)
    torch.set_num_threads(config.num_threads or _default_threads())
    description = describe_model(Path(config.model_dir), config.quantization)
    dtype = compute_dtype(description, config.dtype, device)
    plan = plan_memory(config, description, dtype, device, memory)
    if device.type == "cuda":
        check_host_pool(plan)
    log.info("engine.memory_planned", device=str(device), **plan.fields())
    readers = ThreadPoolExecutor(_read_threads(), thread_name_prefix="adapter-read")
    host_memory = readers.submit(_host_memory, plan.host_pool_bytes, device, phases)
    with phases.phase("weights"):
        model = load_model(
            description,
            dtype=dtype,
            device=device,
            num_positions=plan.max_context_tokens,
            load_format=config.load_format,
            batch_invariant=config.batch_invariant,
        )
    attentions = [layer.attention for layer in description.spec.layers]
    cached = cache_dtype(config.kv_cache_dtype, attentions, dtype, device)
    cache = allocate_cache(attentions, plan.num_blocks, config.block_tokens, cached, device, model.kv_scales)
    placer = AdapterPlacer(model.schema, model.base_digest, dtype.itemsize, config.max_rank)
    host_pool = PinnedHostPool(placer, dtype, plan.host_pool_bytes, readers, host_memory.result())
    arena = TensorArena(
        host_pool,
        placer.indices,
        num_slots=config.num_slots,
        max_rank=config.max_rank,
        total_bytes=plan.arena_bytes,
        dtype=dtype,
        device=device,
    )
    table = RequestTable(config.max_running_requests, plan.max_context_tokens, config.block_tokens)
    forward = ForwardPass(
        model.decoder,
        cache,
        arena.tables,
        max_requests=config.max_running_requests,
        lora_beside=_lora_beside(config, device),
    )
    if device.type == "cuda":  # elsewhere no kernel is chosen
        MEASURED.keep_for(forward)
    builder = make_builder(config, table, forward)
    graphs = StepGraphs(forward)
    runner = BatchModelRunner(forward, graphs, table, builder, TokenSampler(table))
    compiled = None
    if device.type == "cuda":
        check_heads(model.decoder)
        compiled = CompileCounter(graphs)
        warm_up(forward, graphs, runner, builder, _limits(config, plan), phases)
        compiled.ready()
    log.info(
        "engine.loaded",
        device=str(device),
        quantization=_quantization(config, description),
        kv_cache_dtype=str(cached).removeprefix("torch."),
        graphs=len(graphs),
        **_fields(phases),
    )
    info = _facts(config, description, model, dtype, plan, phases)
    return DeviceBackend(info, runner, host_pool, arena, compiled)


def _facts(
    config: BackendConfig,
    description: ModelDescription,
    model: LoadedModel,
    dtype: torch.dtype,
    plan: MemoryPlan,
    phases: StartPhases,
) -> ModelFacts:
    return ModelFacts(
        model_name=Path(config.model_dir).resolve().name,
        architecture=description.architecture,
        base_digest=model.base_digest,
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=description.spec.vocab_size,
        eos_token_ids=description.defaults.eos_token_ids,
        lora_schema=model.schema.to_json(),
        max_context_tokens=plan.max_context_tokens,
        num_blocks=plan.num_blocks,
        start_phases=phases.all(),
    )


def _quantization(config: BackendConfig, description: ModelDescription) -> str:
    """The method that the checkpoint names, else the one that weights were quantised by at load."""
    stored = description.config.section("quantization_config")
    return config.quantization or "none" if stored is None else stored.text("quant_method")


def _fields(phases: StartPhases) -> dict[str, float]:
    return {f"{name}_s": seconds for name, seconds in phases.all()}


def make_builder(config: BackendConfig, table: RequestTable, forward: ForwardPass) -> BatchBuilder:
    """The batch builder with its buffers, sized for the largest step."""
    device, cache = forward.sampled.device, forward.cache
    sizes, counts = graph_sizes(config, device)
    num_rows = max(config.max_step_tokens, config.max_running_requests) + ROW_TILE
    largest = StepShape(
        num_rows, config.max_running_requests, table.blocks.shape[1], config.max_running_requests, pads=True
    )
    shapes = StepShapes.of(
        sizes,
        counts,
        max_requests=config.max_running_requests,
        max_step_tokens=config.max_step_tokens,
        max_context_tokens=table.tokens.shape[1] - 1,
        block_tokens=config.block_tokens,
    )
    return BatchBuilder(
        table,
        StepBuffers(largest, _STEPS_IN_FLIGHT + 1, device),
        shapes,
        block_tokens=config.block_tokens,
        spare_slot=(cache[0].keys.shape[0] - 1) * config.block_tokens,
        device=device,
    )


def _lora_beside(config: BackendConfig, device: torch.device) -> BesideRows | None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return runs_beside(name, config.lora_overlap)


def _limits(config: BackendConfig, plan: MemoryPlan) -> StepLimits:
    return StepLimits(
        max_step_tokens=config.max_step_tokens,
        max_running_requests=config.max_running_requests,
        max_context_tokens=plan.max_context_tokens,
        cache_tokens=plan.num_blocks * config.block_tokens,
        block_tokens=config.block_tokens,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return _chosen_device()
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or not (index == "" or index.isdecimal()):
        raise ModelConfigError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:<index>")
    found = torch.cuda.device_count()
    if kind == "cuda" and found <= int(index or 0):
        raise ModelConfigError(
            f"device {name!r} was asked for, but torch {torch.__version__} finds {found} GPUs on this "
            "machine; --device cpu runs without one"
        )
    return torch.device(name)


def _chosen_device() -> torch.device:
    """A GPU that torch can use, or the CPU."""
    if torch.cuda.device_count():
        return torch.device("cuda")
    if _DRIVER.exists():
        reason = (
            "torch is a CPU build" if torch.version.cuda is None else "torch finds no GPU that it can use"
        )
        log.warning("engine.gpu_not_used", device="cpu", torch=torch.__version__, reason=reason)
    return torch.device("cpu")
