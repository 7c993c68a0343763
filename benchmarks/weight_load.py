"""How fast a checkpoint becomes a model: GB/s, and the host memory it takes meanwhile.

    python benchmarks/weight_load.py --shape qwen3-30b-a3b --layers 1     a synthetic checkpoint of that shape
    python benchmarks/weight_load.py --model-dir DIR --device cuda        an own one
    python benchmarks/weight_load.py --shape gpt-oss-20b --load-format dummy --device cuda

`--cold` drops the files from the page cache first, so that the disk is measured.
"""

import argparse
import json
import math
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from inference_service.models import compute_dtype, describe_model, load_model
from inference_service.models.spec import ModelSpec
from inference_service.models.stored_tensors import stored_tensors
from lorikeet_bench.model_shape import shape_names, write_model_shape

_BLOCK = 32 << 20
_SCALE_BYTE = 120


def write_checkpoint(directory: Path, spec: ModelSpec) -> int:
    """Write model.safetensors with small random values; returns its bytes."""
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.standard_normal(_BLOCK // 2, dtype=np.float32) * 0.02)
    floats = values.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    codes = rng.bytes(_BLOCK)
    header: dict[str, object] = {}
    offset = 0
    tensors = stored_tensors(spec)
    for name, tensor in tensors.items():
        dtype, itemsize = ("U8", 1) if tensor.is_packed else ("BF16", 2)
        end = offset + math.prod(tensor.shape) * itemsize
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 64)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name, tensor in tensors.items():
            left = math.prod(tensor.shape) * (1 if tensor.is_packed else 2)
            block = bytes([_SCALE_BYTE]) * _BLOCK if name.endswith("_scales") else codes
            block = block if tensor.is_packed else floats
            while left:
                left -= file.write(block[: min(left, _BLOCK)])
    return offset


@contextmanager
def model_directory(arguments: argparse.Namespace) -> Iterator[Path]:
    """The given directory, or a synthetic one that is deleted afterwards."""
    if arguments.model_dir is not None:
        yield arguments.model_dir
        return
    with tempfile.TemporaryDirectory(prefix="lorikeet-weights-", dir=arguments.scratch) as scratch:
        changes = dict(arguments.shape_set)
        if arguments.layers is not None:
            changes = {"num_hidden_layers": arguments.layers, **changes}
        directory = write_model_shape(Path(scratch), arguments.shape, changes)
        if arguments.load_format != "dummy":
            num_bytes = write_checkpoint(directory, describe_model(directory).spec)
            print(f"wrote {num_bytes / 1e9:.2f} GB of {arguments.shape}")
        yield directory


def assignment(text: str) -> tuple[str, object]:
    """A field of config.json and its value."""
    key, _, value = text.partition("=")
    return key, json.loads(value)


def drop_from_page_cache(directory: Path) -> None:
    """Let the next read come from the disk."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def own_peak_bytes() -> int:
    """The most memory this process has had at once; files that it has mapped count too."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, object]:
    """Load the model `--repeat` times; the figures of the fastest."""
    device = torch.device(arguments.device)
    description = describe_model(directory)
    dtype = compute_dtype(description, arguments.dtype, device)
    num_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the context's start is not the load's
    took: list[float] = []
    cpu: list[float] = []
    for _ in range(arguments.repeat):
        if arguments.cold:
            drop_from_page_cache(directory)
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        model = load_model(
            description, dtype=dtype, device=device, num_positions=64, load_format=arguments.load_format
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - begun_s)
        cpu.append(time.process_time() - begun_cpu_s)
        del model
    result: dict[str, object] = {
        "seconds": [round(seconds, 3) for seconds in took],
        "cpu_seconds": [round(seconds, 3) for seconds in cpu],
        "file_gb": round(num_bytes / 1e9, 3),
        "gb_per_s": round(num_bytes / 1e9 / min(took), 2),
        "host_peak_gb": round(own_peak_bytes() / 1e9, 2),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "cold": arguments.cold,
    }
    if device.type == "cuda":
        result["device_peak_gb"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 2)
    return result


def main() -> None:
    """Parse, measure, print one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-dir", type=Path)
    parser.add_argument("--shape", choices=shape_names(), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="of the synthetic model; default: all")
    parser.add_argument(
        "--shape-set", type=assignment, action="append", default=[], metavar="FIELD=JSON",
        help="another value of the shape's config.json",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--scratch", type=Path, help="where the synthetic checkpoint is written")
    arguments = parser.parse_args()
    if arguments.scratch is not None and not arguments.scratch.is_dir():
        parser.error(f"--scratch {arguments.scratch} is no directory")
    with model_directory(arguments) as directory:
        print(json.dumps(measure(arguments, directory)))


if __name__ == "__main__":
    main()
