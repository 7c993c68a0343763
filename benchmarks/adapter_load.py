"""How fast an adapter becomes usable: page cache to host memory, host memory to the arena, and both.

    python benchmarks/adapter_load.py                               gpt-oss-20b, rank 32 on qkv, o, experts
    python benchmarks/adapter_load.py --device cuda --adapters 8    on a GPU, the device's work included

No model is loaded: the parts are those of the engine process, on an otherwise idle machine. "usable" is when
the tables that kernels read name the adapter.
"""

import argparse
import hashlib
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from inference_service.execution.adapter_layout import AdapterPlacer
from inference_service.execution.device_arena import TensorArena
from inference_service.execution.host_memory import PageableMemory, pinned_memory
from inference_service.execution.host_pool import PinnedHostPool
from inference_service.models import describe_model
from inference_service.models.lora_sites import lora_schema
from lorikeet_bench.load.generated_adapters import AdapterShape, parse_sites
from lorikeet_bench.machine import describe_machine
from lorikeet_bench.model_shape import shape_names, write_model_shape
from lorikeet_contract.manifest import Manifest, PayloadDtype, PayloadLayer, place_layer
from lorikeet_contract.schema import LoraSchema

_BASE = "bench"
_MAX_THREADS = 12


@dataclass(frozen=True, slots=True)
class Written:
    """A payload on disk."""

    manifest: Manifest
    path: str


def write_adapter(
    path: Path, schema: LoraSchema, keys: set[str], rank: int, scale: float, seed: int
) -> Written:
    """Small random bfloat16 values at every site of the given keys, a layer at a time."""
    block = np.random.default_rng(seed).standard_normal(1 << 22, dtype=np.float32) * 0.01
    values = torch.from_numpy(block).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    layers: list[PayloadLayer] = []
    offset = 0
    with path.open("wb") as file:
        for number in range(schema.num_layers):
            sites = [site for site in schema.sites if site.layer == number and site.key in keys]
            placed, end = place_layer(offset, [(site, rank, 1, (scale,)) for site in sites], 2)
            repeats = -(-(end - offset) // len(values))
            data = (values * repeats)[: end - offset]
            file.write(data)
            sha256 = hashlib.sha256(data).hexdigest()
            layers.append(PayloadLayer(number, offset, end - offset, sha256, placed))
            offset = end
    manifest = Manifest(_BASE, schema.digest, PayloadDtype.BFLOAT16, offset, tuple(layers))
    return Written(manifest, str(path))


def usable(arena: TensorArena, digest: str, slot: int, device: torch.device) -> float:
    """Seconds from the copy's begin until the tables name the adapter, on the device too."""
    begun_s = time.perf_counter()
    assert arena.begin_copy(digest, slot), "the arena is too small"
    while slot not in arena.poll():
        pass
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun_s


def ms(seconds: list[float]) -> dict[str, float]:
    """Median and extremes."""
    return {
        "median": round(1e3 * statistics.median(seconds), 1),
        "least": round(1e3 * min(seconds), 1),
        "most": round(1e3 * max(seconds), 1),
    }


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, object]:
    """Write the adapters, then load each `--repeat` times."""
    device, dtype = torch.device(arguments.device), torch.bfloat16
    shape = write_model_shape(scratch / "model", arguments.shape, dict(arguments.shape_set))
    schema = lora_schema(describe_model(shape).spec, lambda _name: ("", ""))
    made = AdapterShape(arguments.rank, parse_sites(arguments.sites))
    keys = {site.key for site in made.chosen(schema)}
    adapters = [
        write_adapter(scratch / f"{i}", schema, keys, arguments.rank, arguments.scale, i)
        for i in range(arguments.adapters)
    ]
    placer = AdapterPlacer(schema, _BASE, dtype.itemsize, arguments.rank)
    num_bytes = placer.place(adapters[0].manifest).num_bytes
    begun_s = time.perf_counter()
    room = num_bytes * len(adapters)
    memory = pinned_memory(room) if device.type == "cuda" else PageableMemory()
    pinning_s = time.perf_counter() - begun_s
    threads = arguments.threads or max(2, min(_MAX_THREADS, len(os.sched_getaffinity(0)) - 2))
    to_host: list[float] = []
    host_cpu: list[float] = []
    to_device: list[float] = []
    from_file: list[float] = []
    with ThreadPoolExecutor(threads) as readers:
        pool = PinnedHostPool(placer, dtype, room, readers, memory)
        arena = TensorArena(
            pool, placer.indices, num_slots=len(adapters), max_rank=arguments.rank, total_bytes=room,
            dtype=dtype, device=device,
        )  # fmt: skip
        for _ in range(arguments.repeat):
            for slot, adapter in enumerate(adapters):
                digest = adapter.manifest.digest
                begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
                pool.read(adapter.manifest, adapter.path)
                to_host.append(time.perf_counter() - begun_s)
                host_cpu.append(time.process_time() - begun_cpu_s)
                to_device.append(usable(arena, digest, slot, device))
                from_file.append(time.perf_counter() - begun_s)
            for slot, adapter in enumerate(adapters):
                arena.release(slot)
                pool.drop(adapter.manifest.digest)
            arena.poll()
    return {
        "shape": arguments.shape,
        "sites": sorted(keys),
        "rank": arguments.rank,
        "adapter_mb": round(num_bytes / 1e6, 1),
        "threads": threads,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "pinning_s_per_gb": round(pinning_s / (room / 1e9), 3),
        "page_cache_to_host_ms": ms(to_host),
        "page_cache_to_host_cpu_ms": ms(host_cpu),
        "host_to_usable_ms": ms(to_device),
        "page_cache_to_usable_ms": ms(from_file),
        "host_to_usable_gb_per_s": round(num_bytes / 1e9 / statistics.median(to_device), 1),
    }


def assignment(text: str) -> tuple[str, object]:
    """A field of config.json and its value."""
    key, _, value = text.partition("=")
    return key, json.loads(value)


def main() -> None:
    """Parse, measure, print one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=shape_names(), default="gpt-oss-20b")
    parser.add_argument(
        "--shape-set", type=assignment, action="append", default=[], metavar="FIELD=JSON",
        help="another value of the shape's config.json",
    )  # fmt: skip
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--scale", type=float, default=0.7, help="alpha / rank; 1 leaves nothing to multiply")
    parser.add_argument("--sites", default="", help="keys, with commas; default: attention, experts and MLPs")
    parser.add_argument("--adapters", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scratch", help="where the payloads are written")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lorikeet-adapters-", dir=arguments.scratch) as scratch:
        machine = asdict(describe_machine("torch"))
        print(json.dumps({"machine": machine, **measure(arguments, Path(scratch))}))


if __name__ == "__main__":
    main()
