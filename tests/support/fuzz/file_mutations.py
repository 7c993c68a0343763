"""Mutations of the set of files: missing ones, others beside them, shards and their index, links."""

import json
import random
from typing import Any

from tests.support.fuzz.adapter_draft import CONFIG, INDEX, LINK_KINDS, WEIGHTS, Draft, Mutation

_BESIDE = {
    "README.md": b"# mine", "adapter_model.bin": b"\x80\x04cos\nsystem\n(S'touch /tmp/x'\ntR.",
    "optimizer.pt": b"PK",
    "tokenizer.json": b"{}", ".hidden": b"", "adapter_model.safetensors.tmp": b"x",
    "Adapter_Config.json": b"{}",
    "adapter_model-00001-of-00002.safetensors": b"x", INDEX: b"{}", "training_args.bin": b"\x80\x04.",
    "x" * 200: b"",
    "new\nline": b"", "\u202ename": b"", "adapter_config.json.bak": b"{", WEIGHTS + ".index": b"",
}  # fmt: skip


def missing(rng: random.Random, draft: Draft) -> None:
    """A file, or all."""
    gone = rng.choice([[CONFIG], [rng.choice(list(draft.headers))], [INDEX], list(draft.files)])
    for name in gone:
        draft.files.pop(name, None)
    draft.note(f"files missing: {gone}", CONFIG, WEIGHTS, INDEX, "shard")


def beside(rng: random.Random, draft: Draft) -> None:
    """A file that is no adapter's, or a second form of the weights."""
    name, data = rng.choice(list(_BESIDE.items()))
    if name not in draft.files:
        draft.files[name] = data
    draft.note(f"file beside: {name!a}", CONFIG, WEIGHTS, INDEX, "file", "shard")


def renamed(rng: random.Random, draft: Draft) -> None:
    """A file under a name that is nearly right."""
    name = rng.choice(list(draft.files))
    new = rng.choice(
        [
            name.upper(),
            f"{name} ",
            f"x{name}",
            name.replace("adapter", "model"),
            "adapter_model-00001-of-00001.safetensors",
        ]
    )
    draft.files[new] = draft.files.pop(name)
    draft.note(f"file {name} is called {new!a}", CONFIG, WEIGHTS, INDEX, "file", "shard")


def exchanged(rng: random.Random, draft: Draft) -> None:
    """One file's content under another's name, or a file of nothing."""
    first, second = rng.choice(list(draft.files)), rng.choice(list(draft.files))
    draft.files[first] = rng.choice(
        [draft.files[second], b"", b"\0" * 8, b"\0" * 100, b"PK\x03\x04", b"{}", b"\x89HDF"]
    )
    draft.note(f"file {first} has other content", first, second, "tensor", "shard")


def link(rng: random.Random, draft: Draft) -> None:
    """A link, a folder or a pipe where a file should be."""
    name = rng.choice([*draft.files, CONFIG, WEIGHTS])
    kind = rng.choice(LINK_KINDS)
    draft.links = [(k, n) for k, n in draft.links if n != name] + [(kind, name)]
    draft.note(f"{name} is a {kind}", name, "missing", "shard", "keep the one")


def index(rng: random.Random, draft: Draft) -> None:
    """An index that does not say what the shards hold."""
    if INDEX not in draft.files:
        draft.files[INDEX] = b"{}"
    try:
        document: Any = json.loads(draft.files[INDEX])
        weight_map: Any = document.get("weight_map", {})
    except (ValueError, AttributeError, RecursionError):
        return
    if not isinstance(weight_map, dict):
        return
    name = rng.choice(list(weight_map)) if weight_map else "x"
    bad: list[Any] = [
        "../../etc/passwd", "/etc/passwd", "x", None, 1, [], "adapter_model-00009-of-00009.safetensors",
        CONFIG, "a\x00b",
        "é" * 1000, INDEX, WEIGHTS,
    ]  # fmt: skip
    match rng.randrange(6):
        case 0:
            weight_map[name] = rng.choice(bad)
        case 1:
            weight_map.pop(name, None)
        case 2:
            weight_map["more"] = next(iter(weight_map.values()), "x")
        case 3:
            document["weight_map"] = rng.choice([None, [], "x", {}, 1])
        case 4:
            document["metadata"] = rng.choice([None, [1] * 1000, "x", {"total_size": -1}])
        case _:
            weight_map |= {f"t{n}": "adapter_model-00001-of-00002.safetensors" for n in range(50_000)}
    draft.files[INDEX] = json.dumps(document).encode()
    if rng.random() < 0.2:
        draft.files[INDEX] = draft.files[INDEX][:-1] + b', "weight_map": {}}'
    draft.note(f"index: {name} and more", INDEX, "shard", "tensor", "keep the one")


FILES: tuple[Mutation, ...] = (missing, beside, renamed, exchanged, link, link, index)
