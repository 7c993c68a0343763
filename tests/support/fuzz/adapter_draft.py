"""An adapter directory in pieces that a mutation can take hold of, and the directory that they make."""

import json
import math
import os
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
INDEX = "adapter_model.safetensors.index.json"
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass
class Tensor:
    """One tensor as a file has it."""

    dtype: str
    shape: list[int]
    data: bytes

    def copy(self) -> "Tensor":
        """Its own."""
        return Tensor(self.dtype, list(self.shape), self.data)


@dataclass
class Draft:
    """A directory in the making.

    `config` and `tensors` are whole values; `headers` has a header for each weights file once `serialise`
    ran, and `files` the bytes of every file once `finish` ran. `recipe` tells what was done, `subjects` what
    a refusal may name. `links` are made last: (kind, name) of entries that are no plain files.
    """

    model: str
    source: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    num_shards: int = 1
    headers: dict[str, dict[str, Any]] = field(default_factory=dict)
    bodies: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    links: list[tuple[str, str]] = field(default_factory=list)
    recipe: list[str] = field(default_factory=list)
    subjects: list[str] = field(default_factory=list)

    def note(self, what: str, *subjects: str) -> None:
        """Remember a mutation."""
        self.recipe.append(what)
        self.subjects.extend(subjects)

    def module_of(self, name: str) -> str:
        """The end of a tensor's module path, which no message cuts off."""
        return ".".join(name.removeprefix("base_model.model.").partition(".lora_")[0].split(".")[-2:])

    def serialise(self) -> None:
        """Headers and bodies of the weights files, and the index if there are several."""
        names = list(self.tensors)
        weight_map: dict[str, str] = {}
        for number in range(self.num_shards):
            file = (
                WEIGHTS
                if self.num_shards == 1
                else f"adapter_model-{number + 1:05}-of-{self.num_shards:05}.safetensors"
            )
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            body = bytearray()
            for name in names[number :: self.num_shards]:
                tensor = self.tensors[name]
                end = len(body) + len(tensor.data)
                header[name] = {
                    "dtype": tensor.dtype,
                    "shape": tensor.shape,
                    "data_offsets": [len(body), end],
                }
                body += tensor.data
                weight_map[name] = file
            self.headers[file], self.bodies[file] = header, bytes(body)
        if self.num_shards > 1:
            index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
            self.files[INDEX] = json.dumps(index).encode()

    def finish(self) -> None:
        """Bytes of every file."""
        for file, header in self.headers.items():
            text = json.dumps(header).encode()
            self.files[file] = struct.pack("<Q", len(text)) + text + self.bodies[file]
        self.files[CONFIG] = json.dumps(self.config).encode()

    def write(self, directory: Path) -> None:
        """The directory, links and all; its parent takes what links point at."""
        directory.mkdir()
        for name, data in self.files.items():
            (directory / name).write_bytes(data)
        for kind, name in self.links:
            path, aside = directory / name, directory.parent / "aside"
            if path.exists():
                aside.write_bytes(path.read_bytes())
                path.unlink()
            else:
                aside.write_bytes(b"x")
            _LINKS[kind](path, aside)


_LINKS: dict[str, Callable[[Path, Path], object]] = {
    "symlink": lambda path, aside: path.symlink_to(aside),
    "dangling": lambda path, aside: path.symlink_to(aside.with_name("nowhere")),
    "hard link": lambda path, aside: path.hardlink_to(aside),
    "folder": lambda path, aside: path.mkdir(),
    "pipe": lambda path, aside: os.mkfifo(path),
    "loop": lambda path, aside: path.symlink_to(path),
}
LINK_KINDS = tuple(_LINKS)


def read_draft(model: str, source: str, config: bytes, weights: bytes) -> Draft:
    """Take a sound adapter apart."""
    (length,) = struct.unpack("<Q", weights[:8])
    header = json.loads(weights[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = dict[str, Tensor]()
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = Tensor(entry["dtype"], entry["shape"], weights[start:end])
        assert end - start == math.prod(entry["shape"]) * ITEM_BYTES[entry["dtype"]]
    return Draft(model, source, json.loads(config), tensors)


Mutation = Callable[[random.Random, Draft], None]
