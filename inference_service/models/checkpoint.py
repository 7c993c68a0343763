"""A model's safetensors shards as one strict source of weights."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from inference_service.models.config import ConfigReader
from inference_service.models.errors import CheckpointError
from inference_service.models.finite import extremes, is_finite
from inference_service.models.safetensors_file import SafetensorsFile
from inference_service.models.weight_reader import TensorRead, WeightReader

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PAGE_BYTES = 4096
_CPU = torch.device("cpu")
_SHOWN = 8
_FLOATS, _BYTES, _E4M3 = ("BF16", "F16", "F32", "F64"), ("U8",), ("F8_E4M3",)
_TAKEN = {torch.uint8: _BYTES, torch.float8_e4m3fn: _E4M3}
# Fields that tools rewrite without changing the model.
_UNSTABLE_FIELDS = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"})
# Buffers that old transformers versions saved and that are computed from the config.
_COMPUTED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".input_scale_ub")


class WeightSource(Protocol):
    """Fills parameters by their checkpoint names; `finish` reports everything that did not fit.

    A parameter of bytes takes bytes, one of e4m3 takes e4m3, another one of floats takes floats of 16 bits or
    more, and nothing else.
    """

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """The stored shape of the tensor `name`; None where there is none, or any would do."""
        ...

    def read_into(self, destination: torch.Tensor, name: str, *, transpose: bool = False) -> None:
        """Begin to copy the tensor `name` into `destination`, a view of a parameter, in its dtype."""
        ...

    def wait(self, *names: str) -> None:
        """Return once these are in place for work enqueued from now on; `finish` waits for all."""
        ...

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """Raise CheckpointError if a tensor was missing, did not fit, or was left over and not `ignored`.

        A name in `ignored` that ends in "." stands for all names below it.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Use:
    """A tensor that a parameter of `dtype` took."""

    read: TensorRead
    dtype: torch.dtype
    destination: torch.Tensor | None  # None where nothing is left to check on it


class Checkpoint:
    """The shards of one model directory, whose names are asked for without `prefix`. Close it.

    Parameters on `device` are filled by threads while the model is being built.

    Raises:
        CheckpointError: no safetensors files, a damaged one, or an index that does not match them.
    """

    def __init__(self, model_dir: Path, prefix: str = "", device: torch.device = _CPU) -> None:
        self.model_dir = model_dir
        self._prefix = prefix
        self.files = [SafetensorsFile(path) for path in _shards(model_dir)]
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in self.files:
            for name in file.tensors:
                if name in self._file_of:
                    raise CheckpointError(
                        f"{model_dir}: tensor {name!r} is in both {self._file_of[name].path.name} and "
                        f"{file.path.name}"
                    )
                self._file_of[name] = file
        self._reader = WeightReader(device)
        self._uses: dict[str, _Use] = {}
        self._missing: list[str] = []
        self._misshaped: list[str] = []
        self._mistyped: list[str] = []
        self._suspects: set[str] = set()  # have a value that is not finite in the parameter; from any thread

    def close(self) -> None:
        """End the threads; what was not waited for is given up."""
        self._reader.close()

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """See WeightSource."""
        file = self._file_of.get(self._prefix + name)
        return None if file is None else file.tensors[self._prefix + name].shape

    def read_into(self, destination: torch.Tensor, name: str, *, transpose: bool = False) -> None:
        """See WeightSource; problems are kept for `finish`, so that one error names them all."""
        name = self._prefix + name
        file = self._file_of.get(name)
        if file is None:
            self._missing.append(name)
            return
        self._uses[name] = _Use(TensorRead(), destination.dtype, None)
        stored = file.tensors[name]
        wanted_dtypes = _TAKEN.get(destination.dtype, _FLOATS)
        if stored.dtype_name not in wanted_dtypes:
            self._mistyped.append(
                f"{name} is {stored.dtype_name}, this model's are {', '.join(wanted_dtypes)}"
            )
            return
        view = destination.transpose(-1, -2) if transpose else destination
        if view.shape != stored.shape:
            self._misshaped.append(f"{name} is {list(stored.shape)}, config.json makes it {list(view.shape)}")
            return

        def check(part: torch.Tensor) -> None:
            if not is_finite(part):
                self._suspects.add(name)

        read = self._reader.read(file.part(name), view, check)
        is_unchecked = destination.is_floating_point() and destination.device.type != "cpu"
        # Others are not held on to: packed experts are laid out anew and given up while the rest is read.
        self._uses[name] = _Use(read, destination.dtype, destination if is_unchecked else None)

    def wait(self, *names: str) -> None:
        """See WeightSource."""
        for name in names:
            if use := self._uses.get(self._prefix + name):
                use.read.wait()
        self._reader.join_stream()

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """See WeightSource."""
        for use in self._uses.values():
            use.read.wait()
        self._reader.join_stream()
        self._suspects |= self._not_finite_on_device()
        below = tuple(name for name in ignored if name.endswith("."))
        unexpected = [
            name
            for name in sorted(self._file_of)
            if name not in self._uses
            and name not in ignored
            and not name.startswith(below)
            and not name.endswith(_COMPUTED_SUFFIXES)
        ]
        too_large, not_finite = self._judge_suspects()
        problems = [
            f"{len(names)} {what}: {'; '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''}"
            for what, names in (
                ("missing", self._missing),
                ("misshaped", self._misshaped),
                ("of another dtype", self._mistyped),
                ("too large", too_large),
                ("with infinities or NaNs", not_finite),
                ("unexpected", unexpected),
            )
            if names
        ]
        if problems:
            raise CheckpointError(
                f"the tensors in {self.model_dir} do not fit its config.json: {', '.join(problems)}"
            )

    def _not_finite_on_device(self) -> set[str]:
        """Names of the tensors that left values that are not finite in parameters on the device.

        One question for each parameter: most are made up of several tensors, experts of hundreds.
        """
        uses = [(name, use.destination) for name, use in self._uses.items() if use.destination is not None]
        parameters: dict[int, torch.Tensor] = {}
        for _, destination in uses:
            storage = destination.untyped_storage()
            if storage.data_ptr() not in parameters:
                parameters[storage.data_ptr()] = destination.new_empty(0).set_(storage)
        if not parameters:
            return set()
        values = torch.stack([extremes(parameter) for parameter in parameters.values()]).tolist()
        bad = {
            address
            for address, pair in zip(parameters, values, strict=True)
            if not all(map(math.isfinite, pair))
        }
        return {
            name
            for name, destination in uses
            if destination.untyped_storage().data_ptr() in bad and not is_finite(destination)
        }

    def _judge_suspects(self) -> tuple[list[str], list[str]]:
        """Of the tensors whose parameters are not finite: those too large for the dtype, and the others."""
        too_large: list[str] = []
        not_finite: list[str] = []
        for name, use in self._uses.items():
            if name not in self._suspects:
                continue
            file = self._file_of[name]
            dtype_name = file.tensors[name].dtype_name
            if is_finite(file.tensor(name)):
                shown = str(use.dtype).removeprefix("torch.")
                too_large.append(f"{name} ({dtype_name}) has values beyond {shown}'s range")
            else:
                not_finite.append(f"{name} ({dtype_name})")
        return too_large, not_finite

    def stored(self, name: str) -> tuple[str, str]:
        """The safetensors dtype name and the sha256 of a tensor's bytes; both "" where it is missing."""
        name = self._prefix + name
        file = self._file_of.get(name)
        if file is None:
            return "", ""
        return file.tensors[name].dtype_name, file.sha256(name)

    def base_digest(self, config: ConfigReader) -> str:
        """Identity of the base model, cheap at any size.

        A sha256 over, in this order,

        1. config.json as canonical JSON (sorted keys, no white space) without the fields that tools rewrite,
        2. each shard's safetensors header, shards by file name, and after each header
        3. the first 4096 bytes of each of its tensors, by tensor name.

        Every part is preceded by its length (8 bytes, little-endian). Training moves every tensor, so its
        first page tells two checkpoints apart without reading all of them.
        """
        digest = hashlib.sha256()

        def add(part: bytes | memoryview) -> None:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)

        stable = {k: v for k, v in config.fields.items() if k not in _UNSTABLE_FIELDS}
        add(json.dumps(stable, sort_keys=True, separators=(",", ":")).encode())
        for file in self.files:
            add(file.header)
            for name in sorted(file.tensors):
                add(file.raw(name, _PAGE_BYTES))
        return digest.hexdigest()


def _shards(model_dir: Path) -> list[Path]:
    index = model_dir / INDEX
    if not index.exists():
        if (model_dir / SINGLE).exists():
            return [model_dir / SINGLE]
        raise CheckpointError(
            f"{model_dir} holds neither {SINGLE} nor {INDEX}; only safetensors checkpoints are read"
        )
    try:
        weight_map = cast("dict[str, Any]", json.loads(index.read_bytes()))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {error!r}") from error
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index} names the shard {name!r}, which is not a file beside it")
    return [model_dir / name for name in names]
