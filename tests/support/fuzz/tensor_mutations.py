"""Mutations that leave a sound safetensors file: which tensors there are, their names, shapes and values."""

import math
import random
import re

import numpy as np

from tests.support.fuzz.adapter_draft import ITEM_BYTES, Draft, Mutation, Tensor

_RENAMES = (
    ("base_model.model.", ""), ("base_model.model.", "base_model.model.base_model.model."),
    (".weight", ".default.weight"), (".weight", ".other.weight"), (".weight", ""), ("lora_A", "lora_B"),
    ("lora_B", "lora_A"), ("model.layers", "model.language_model.layers"),
    ("model.layers", "vision_model.layers"),
    ("layers.0", "layers.1"), ("layers.1", "layers.99"), ("layers.0", "layers.00"), ("layers.0", "layers.-1"),
    ("experts.0", "experts.1"), ("experts.0", "experts.8"), ("experts.1", "experts.01"),
    ("experts", "expert"),
    ("experts", "experts.base_layer"), (".base_layer", ""), ("self_attn", "attn"), ("q_proj", "v_proj"),
    ("q_proj", "Q_PROJ"), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"),
    ("lora_", "lora_embedding_"),
    ("lora_A.weight", "lora_magnitude_vector"), ("lora_B.weight", "lora_B.bias"), ("mlp", "block_sparse_moe"),
    ("model.", "model/"), ("proj", "proj\u00e9"), ("proj", "proj\x00"), ("proj", "p" * 600),
    ("proj", "../../proj"),
    ("model.layers", "model.model.layers"), ("lora_A", "lora_A.modules_to_save"), ("lora_A", "LORA_A"),
)  # fmt: skip
_EXTRAS = (
    "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
    "base_model.model.model.layers.0.self_attn.q_proj.bias",
    "base_model.model.model.norm.weight",
    "base_model.model.lm_head.modules_to_save.weight",
    "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
    "base_model.model.model.embed_tokens.weight",
    "base_model.model.lm_head.base_layer.weight",
    "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
    "base_model.model.model.layers.0.self_attn.rotary_emb.inv_freq",
    "lora_A.weight",
    "..",
    "x",
)
_MODULES = (
    "model.layers.0.self_attn.side_proj", "model.layers.77.self_attn.q_proj",
    "vision_model.encoder.layers.0.q_proj",
    "model.vision_tower.layers.0.self_attn.q_proj", "score", "model.layers.0.mlp.experts.99.gate_proj",
    "model.layers.0.mlp.experts.0", "model.layers.0", "audio_tower.layers.0.q_proj",
)  # fmt: skip


def drop(rng: random.Random, draft: Draft) -> None:
    """A tensor, a whole module, or all but a few."""
    name = rng.choice(list(draft.tensors))
    module = name.partition(".lora_")[0]
    gone = rng.choice([[name], [n for n in draft.tensors if n.startswith(module)], list(draft.tensors)[4:]])
    for tensor in gone:
        del draft.tensors[tensor]
    draft.note(
        f"without {len(gone)} tensors of {module}", draft.module_of(name), "tensors", "weights", "experts"
    )


def rename(rng: random.Random, draft: Draft) -> None:
    """One tensor, one module, or all of them."""
    old, new = rng.choice(_RENAMES)
    chosen = rng.choice(list(draft.tensors))
    module = chosen.partition(".lora_")[0]
    scope = rng.choice(["", module, chosen])
    renamed = dict[str, Tensor]()
    for name, tensor in draft.tensors.items():
        other = name.replace(old, new) if name.startswith(scope) else name
        renamed.setdefault(other, tensor)
    draft.tensors = renamed
    draft.note(
        f"{old!r} is {new!r} in {scope or 'all names'}",
        *(draft.module_of(chosen), "tensor", "layers", "experts", "adapter"),
    )


def add(rng: random.Random, draft: Draft) -> None:
    """A tensor that belongs to no pair, or a pair that belongs to no module."""
    like = rng.choice(list(draft.tensors.values()))
    if rng.random() < 0.5:
        name = rng.choice(_EXTRAS)
        draft.tensors[name] = like.copy()
        draft.note(f"with {name}", name)
        return
    module = rng.choice(_MODULES)
    is_zero = rng.random() < 0.5
    for side, shape in (("A", [2, 3]), ("B", [3, 2])):
        data = b"\0" * 24 if side == "B" and is_zero else np.linspace(1, 2, 6, dtype="<f4").tobytes()
        draft.tensors[f"base_model.model.{module}.lora_{side}.weight"] = Tensor("F32", shape, data)
    draft.note(f"with a pair of {module}, B zero: {is_zero}", module, "experts", "rank")


def copy_module(rng: random.Random, draft: Draft) -> None:
    """One module's tensors also under another's name, at times the same place in another layout."""
    name = rng.choice(list(draft.tensors))
    module = name.partition(".lora_")[0]
    target = rng.choice(
        [
            rng.choice(list(draft.tensors)).partition(".lora_")[0],
            f"{module}.base_layer",
            re.sub(r"layers\.\d+", "layers.0", module),
            module.removeprefix("base_model.model."),
            module.replace("model.layers", "model.language_model.layers"),
        ]
    )
    for other in [n for n in draft.tensors if n.startswith(f"{module}.lora_")]:
        draft.tensors[target + other.removeprefix(module)] = draft.tensors[other].copy()
    draft.note(
        f"{module} also as {target}", draft.module_of(name), draft.module_of(target), "tensor", "experts"
    )


def reshape(rng: random.Random, draft: Draft) -> None:
    """Another shape of as many elements: transposed, flattened, split, of more dimensions."""
    name = rng.choice(list(draft.tensors))
    tensor = draft.tensors[name]
    total = math.prod(tensor.shape)
    tensor.shape = rng.choice(
        [
            tensor.shape[::-1], [total], [1, *tensor.shape], [*tensor.shape, 1], [total, 1], [1, total],
            [2, total // 2],
            [*[1] * 7, total], [*[1] * 8, total], [tensor.shape[0] * 2, *tensor.shape[1:]],
        ]
    )  # fmt: skip
    tensor.data = (tensor.data * 2)[: math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]]
    draft.note(f"{name} of shape {tensor.shape}", draft.module_of(name), "experts")


def cut_rank(rng: random.Random, draft: Draft) -> None:
    """A pair of fewer ranks, sound in itself, with or without the pattern that says so."""
    name = rng.choice([n for n in draft.tensors if "lora_A" in n] or list(draft.tensors))
    other = name.replace("lora_A", "lora_B")
    a, b = draft.tensors[name], draft.tensors.get(other)
    if b is None or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        return
    rank = rng.randrange(1, a.shape[0] + 1)
    size = ITEM_BYTES[a.dtype]
    a_values = np.frombuffer(a.data, f"V{size}").reshape(a.shape)
    b_values = np.frombuffer(b.data, f"V{ITEM_BYTES[b.dtype]}").reshape(b.shape)
    draft.tensors[name] = Tensor(a.dtype, [rank, a.shape[1]], a_values[:rank].tobytes())
    draft.tensors[other] = Tensor(b.dtype, [b.shape[0], rank], b_values[:, :rank].tobytes())
    module = name.partition(".lora_")[0].removeprefix("base_model.model.")
    if rng.random() < 0.7:
        pattern = draft.config.setdefault("rank_pattern", {})
        if isinstance(pattern, dict):
            pattern[module] = rank
    draft.note(f"{module} of rank {rank}", draft.module_of(name), "experts")


def cast(rng: random.Random, draft: Draft) -> None:
    """Other dtypes: values converted, or bytes read as something else."""
    names = rng.choice([[rng.choice(list(draft.tensors))], list(draft.tensors)])
    dtype = rng.choice(["F64", "F32", "F16", "BF16", "I32", "U8", "F8_E4M3", "BOOL", "I64", "U16"])
    for name in names:
        tensor = draft.tensors[name]
        values = np.abs(_values(tensor)) if dtype in ("U8", "U16", "BOOL") else _values(tensor)
        draft.tensors[name] = Tensor(dtype, tensor.shape, _stored(values, dtype))
    draft.note(f"{len(names)} tensors as {dtype}", draft.module_of(names[0]), dtype, "dtype")


def values(rng: random.Random, draft: Draft) -> None:
    """NaN, infinity, the largest and smallest numbers, or zero everywhere."""
    name = rng.choice(list(draft.tensors))
    tensor = draft.tensors[name]
    array = _values(tensor).reshape(-1).copy()
    what = rng.choice(["nan", "inf", "-inf", "1e38", "1e-45", "65504", "65536", "zero"])
    if what == "zero":
        array[:] = 0
    else:
        array[rng.randrange(len(array))] = float(what)
    if tensor.dtype in ("F64", "F32", "F16", "BF16"):
        draft.tensors[name] = Tensor(tensor.dtype, tensor.shape, _stored(array, tensor.dtype))
    draft.note(f"{name} with {what}", draft.module_of(name), "weights")


def swap(rng: random.Random, draft: Draft) -> None:
    """Two tensors for each other, or the order in the file."""
    first, second = rng.choice(list(draft.tensors)), rng.choice(list(draft.tensors))
    if rng.random() < 0.5:
        draft.tensors[first], draft.tensors[second] = draft.tensors[second], draft.tensors[first]
    else:
        items = list(draft.tensors.items())
        rng.shuffle(items)
        draft.tensors = dict(items)
    draft.note(f"{first} and {second}", draft.module_of(first), draft.module_of(second), "experts")


def shard(rng: random.Random, draft: Draft) -> None:
    """Several files with an index, which say the same."""
    draft.num_shards = rng.choice([2, 2, 3, 7])
    draft.note(f"{draft.num_shards} shards", "shard", "index", "tensor")


def _values(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == "BF16":
        return (np.frombuffer(tensor.data, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I32": "<i4", "I64": "<i8", "U16": "<u2"}
    return np.frombuffer(tensor.data, kinds.get(tensor.dtype, "u1")).astype(np.float64)


def _stored(array: np.ndarray, dtype: str) -> bytes:
    with np.errstate(all="ignore"):
        if dtype == "BF16":
            return (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I32": "<i4", "I64": "<i8", "U16": "<u2"}
        return (
            np.nan_to_num(array).astype("u1").tobytes()
            if dtype not in kinds
            else array.astype(kinds[dtype]).tobytes()
        )


TENSORS: tuple[Mutation, ...] = (
    drop, rename, rename, add, copy_module, reshape, cut_rank, cut_rank, cast, values, values, swap, shard,
)  # fmt: skip
