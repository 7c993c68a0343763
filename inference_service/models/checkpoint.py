"""A model's safetensors shards as one strict source of weights."""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from inference_service.models.config import ConfigReader
from inference_service.models.errors import CheckpointError
from inference_service.models.safetensors_file import SafetensorsFile

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PAGE_BYTES = 4096
_SHOWN = 8
_FLOATS, _BYTES = ("BF16", "F16", "F32", "F64"), ("U8",)
# Fields that tools rewrite without changing the model.
_UNSTABLE_FIELDS = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"})
# Buffers that old transformers versions saved and that are computed from the config.
_COMPUTED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


class WeightSource(Protocol):
    """Fills parameters by their checkpoint names; `finish` reports everything that did not fit.

    A parameter of bytes takes bytes, one of floats takes floats of any width, and nothing else.
    """

    def read_into(self, destination: torch.Tensor, name: str, *, transpose: bool = False) -> None:
        """Copy the tensor `name` into `destination` (a view of a parameter), converting its dtype."""
        ...

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """Raise CheckpointError if a tensor was missing, did not fit, or was left over and not `ignored`.

        A name in `ignored` that ends in "." stands for all names below it.
        """
        ...


class Checkpoint:
    """The shards of one model directory, whose names are asked for without `prefix`.

    Raises:
        CheckpointError: no safetensors files, a damaged one, or an index that does not match them.
    """

    def __init__(self, model_dir: Path, prefix: str = "") -> None:
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
        self._used: set[str] = set()
        self._missing: list[str] = []
        self._misshaped: list[str] = []
        self._mistyped: list[str] = []
        self._too_large: list[str] = []
        self._not_finite: list[str] = []

    def read_into(self, destination: torch.Tensor, name: str, *, transpose: bool = False) -> None:
        """See WeightSource; problems are kept for `finish`, so that one error names them all."""
        name = self._prefix + name
        file = self._file_of.get(name)
        if file is None:
            self._missing.append(name)
            return
        self._used.add(name)
        dtype_name = file.tensors[name].dtype_name
        wanted_dtypes = _BYTES if destination.dtype == torch.uint8 else _FLOATS
        if dtype_name not in wanted_dtypes:
            self._mistyped.append(f"{name} is {dtype_name}, this model's are {', '.join(wanted_dtypes)}")
            return
        tensor = file.tensor(name)
        if transpose:
            tensor = tensor.transpose(-1, -2)
        if tensor.shape != destination.shape:
            stored = list(file.tensors[name].shape)
            wanted = list(destination.transpose(-1, -2).shape if transpose else destination.shape)
            self._misshaped.append(f"{name} is {stored}, config.json makes it {wanted}")
            return
        destination.copy_(tensor)
        if not _is_finite(destination):
            shown = str(destination.dtype).removeprefix("torch.")
            if _is_finite(tensor):
                self._too_large.append(f"{name} ({dtype_name}) has values beyond {shown}'s range")
            else:
                self._not_finite.append(f"{name} ({dtype_name})")

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """See WeightSource."""
        below = tuple(name for name in ignored if name.endswith("."))
        unexpected = [
            name
            for name in sorted(self._file_of)
            if name not in self._used
            and name not in ignored
            and not name.startswith(below)
            and not name.endswith(_COMPUTED_SUFFIXES)
        ]
        problems = [
            f"{len(names)} {what}: {'; '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''}"
            for what, names in (
                ("missing", self._missing),
                ("misshaped", self._misshaped),
                ("of another dtype", self._mistyped),
                ("too large", self._too_large),
                ("with infinities or NaNs", self._not_finite),
                ("unexpected", unexpected),
            )
            if names
        ]
        if problems:
            raise CheckpointError(
                f"the tensors in {self.model_dir} do not fit its config.json: {', '.join(problems)}"
            )

    def stored(self, name: str) -> tuple[str, str]:
        """The safetensors dtype name and the sha256 of a tensor's bytes; both "" where it is missing."""
        name = self._prefix + name
        file = self._file_of.get(name)
        if file is None:
            return "", ""
        return file.tensors[name].dtype_name, hashlib.sha256(file.raw(name)).hexdigest()

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


def _is_finite(tensor: torch.Tensor) -> bool:
    """In one pass, at the speed of a copy; `isfinite` makes masks and takes twenty times as long on a CPU."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    extremes = torch.stack(torch.aminmax(tensor))  # a NaN anywhere becomes both
    return all(map(math.isfinite, extremes.tolist()))


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
