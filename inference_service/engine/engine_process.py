"""The engine process: `python -m inference_service.engine.engine_process <launch as JSON>`.

Started by `supervisor.EngineProcess` only. It ends with its parent, whatever way that ends.
"""

import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import structlog

from inference_service.domain.engine import BackendUnusableError, EngineInfo, EngineLimits
from inference_service.domain.start_phases import StartPhases
from inference_service.engine.channel import Endpoints, EngineSide
from inference_service.engine.config import EngineConfig
from inference_service.engine.engine_loop import EngineLoop
from inference_service.engine.garbage import StepCollector
from inference_service.engine.grammar_gate import GrammarGate
from inference_service.engine.launch import Launch
from inference_service.engine.messages import EngineFailed, Ready
from inference_service.engine.payload_cache import PayloadCache
from inference_service.engine.payload_source import CachedPayloadSource
from inference_service.engine.waker import Waker
from inference_service.execution.config import BackendConfig
from inference_service.ports import Backend
from inference_service.residency.config import ResidencyConfig
from inference_service.residency.residency import Residency
from inference_service.scheduler.config import SchedulerConfig
from inference_service.scheduler.scheduler import Scheduler
from lorikeet_rpc.logs import configure_logging

_PR_SET_PDEATHSIG = 1
_STDIN = 0
_LAST_WORDS_MS = 2000

log = structlog.get_logger()


def main(argv: list[str]) -> int:
    """Run one engine; returns the exit status."""
    launch = msgspec.json.decode(argv[1], type=Launch)
    die_with_parent(launch.parent_pid)
    # A terminal's Ctrl-C and a stop of the whole group reach us too; the parent drains and then tells us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.path.extend(path for path in launch.import_path if path not in sys.path)
    configure_logging(json=launch.config.log_json, level=launch.config.log_level)
    phases = StartPhases()
    phases.note("process", time.monotonic() - launch.spawned_s)
    return run_engine(launch.config, launch.endpoints, phases)


def run_engine(config: EngineConfig, endpoints: Endpoints, phases: StartPhases) -> int:
    """Load the backend, then turn the loop until told to end; returns the exit status."""
    waker = Waker()
    side = EngineSide(endpoints, (waker.fd, _STDIN))
    executor = ThreadPoolExecutor(config.num_load_threads, thread_name_prefix="adapter-load")
    is_ready = False
    try:
        with phases.phase("import"):
            factory = load_factory(config.backend_factory)
        backend = factory(backend_config(config))
        for name, seconds in backend.info.start_phases:
            phases.note(name, seconds)
        with phases.phase("loop"):
            collector = StepCollector()
            loop = build_loop(config, backend, side, waker, executor, collector)
            collector.take_over()
        side.send(Ready(engine_info(config, backend, phases)))
        is_ready = True
        loop.run()
    except BackendUnusableError as error:
        # Its message is what the operator needs; a traceback would hide it.
        log.error("engine.start_failed", error=str(error))  # noqa: TRY400
        side.send(EngineFailed(str(error)))
        return 1
    except Exception as error:
        log.exception("engine.step_failed" if is_ready else "engine.start_failed")
        side.send(EngineFailed(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        side.close(_LAST_WORDS_MS)
    return 0


def build_loop(
    config: EngineConfig,
    backend: Backend,
    side: EngineSide,
    waker: Waker,
    executor: ThreadPoolExecutor,
    collector: StepCollector,
) -> EngineLoop:
    """Put the engine's parts together around a loaded backend."""
    source = CachedPayloadSource(PayloadCache(config.disk_cache_dir, config.disk_cache_bytes))
    residency = Residency(
        ResidencyConfig(
            max_loads_in_flight=config.num_load_threads,
            max_wait_s=config.max_adapter_wait_s,
            slot_patience_s=config.slot_patience_s,
            load_retry_s=config.load_retry_s,
        ),
        backend.host_pool,
        backend.arena,
        source,
        executor,
        waker.wake,
        unix_offset_s=time.time() - time.monotonic(),
    )
    scheduler = Scheduler(
        SchedulerConfig(
            block_tokens=config.block_tokens,
            num_blocks=backend.info.num_blocks,
            max_step_tokens=config.max_step_tokens,
            max_running_requests=config.max_running_requests,
            max_waiting_requests=config.max_waiting_requests,
            max_context_tokens=backend.info.max_context_tokens,
            prefix_cache=config.prefix_cache,
        ),
        residency,
    )
    overlaps = backend.runner.is_asynchronous if config.overlap is None else config.overlap
    facts = backend.info
    return EngineLoop(
        backend,
        scheduler,
        residency,
        source,
        side,
        waker,
        _STDIN,
        overlaps=overlaps,
        collector=collector,
        grammars=GrammarGate(Path(config.model_dir), facts.vocab_size, facts.eos_token_ids, waker.wake),
    )


def engine_info(config: EngineConfig, backend: Backend, phases: StartPhases) -> EngineInfo:
    """What the front end is told of the engine."""
    facts = backend.info
    return EngineInfo(
        model_name=config.model_name or facts.model_name,
        architecture=facts.architecture,
        base_digest=facts.base_digest,
        dtype=facts.dtype,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        lora_schema=facts.lora_schema,
        limits=EngineLimits(
            max_context_tokens=facts.max_context_tokens,
            max_running_requests=config.max_running_requests,
            max_waiting_requests=config.max_waiting_requests,
            max_step_tokens=config.max_step_tokens,
            max_top_logprobs=config.max_top_logprobs,
            max_stop_strings=config.max_stop_strings,
            # More could never be taken in at once: they would be refused as a full queue for ever.
            max_samples=min(config.max_samples, config.max_running_requests + config.max_waiting_requests),
            max_rank=config.max_rank,
            max_active_adapters=backend.arena.num_slots,
            adapter_arena_bytes=backend.arena.total_bytes,
            host_pool_bytes=backend.host_pool.total_bytes,
            block_tokens=config.block_tokens,
            num_blocks=facts.num_blocks,
        ),
        start_phases=phases.all(),
    )


def backend_config(config: EngineConfig) -> BackendConfig:
    """The backend's share of the engine's settings."""
    return BackendConfig(
        model_dir=config.model_dir,
        device=config.device,
        dtype=config.dtype,
        block_tokens=config.block_tokens,
        num_blocks=config.num_blocks,
        kv_cache_bytes=config.kv_cache_bytes,
        max_step_tokens=config.max_step_tokens,
        max_running_requests=config.max_running_requests,
        max_context_tokens=config.max_context_tokens,
        max_rank=config.max_rank,
        num_slots=config.max_active_adapters,
        arena_bytes=config.arena_bytes,
        host_pool_bytes=config.host_pool_bytes,
        batch_invariant=config.batch_invariant,
        num_threads=config.num_threads,
        load_format=config.load_format,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        gpu_memory_utilization=config.gpu_memory_utilization,
        cuda_graphs=config.cuda_graphs,
        graph_batch_sizes=config.graph_batch_sizes,
        graph_token_counts=config.graph_token_counts,
        lora_overlap=config.lora_overlap,
        tile_tables=config.tile_tables,
    )


def load_factory(name: str) -> Callable[[BackendConfig], Backend]:
    """Import "module:function"."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent dies, also if that happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent ended before the engine began")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
