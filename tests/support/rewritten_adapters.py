"""One fixture adapter written in all the ways that people's files come in: the function stays the same."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lorikeet_contract.schema import LoraSchema, RowOrder, SiteKind
from tests.support.adapter_directories import PREFIX
from tests.support.expert_layouts import LAYOUTS, Tensors, Weights

# Layouts that name gate and up apart: their rows are those of each, whatever the model's own order.
_BY_SLICES = ("per-expert", "w123", "stacked-w123")
_MARKER = {"lora_B_layout": "grouped_by_expert"}


@dataclass(frozen=True)
class Adapter:
    """An adapter taken apart: 2-D pairs by module, and experts' (gate_up, down) by root module.

    Experts' A are [E, r, in], their B [E, out, r] with rows in the model's own order.
    """

    config: dict[str, Any]
    pairs: Tensors
    experts: dict[str, tuple[Weights, Weights]]
    is_interleaved: bool

    @property
    def rank(self) -> int:
        """Of all modules."""
        return self.config["r"]

    @property
    def scale(self) -> float:
        """Of all modules."""
        return self.config["lora_alpha"] / self.rank

    @property
    def modules(self) -> list[str]:
        """Dotted names of the modules that have 2-D pairs."""
        return sorted({name.rpartition(".lora_A")[0] for name in self.pairs if ".lora_A" in name})

    def fused(self) -> Tensors:
        """Everything as PEFT writes it today."""
        return self.pairs | self.laid_out("peft-fused")

    def laid_out(self, layout: str) -> Tensors:
        """The experts alone, in another layout."""
        tensors: Tensors = {}
        for root, (gate_up, down) in self.experts.items():
            a, b = gate_up
            if layout in _BY_SLICES and self.is_interleaved:
                b = torch.cat([b[:, 0::2], b[:, 1::2]], 1)
            tensors |= LAYOUTS[layout](root, (a, b), down)
        return tensors

    def widened(self, rank: int) -> "Adapter":
        """Of a higher rank: more rows of A, which zero columns of B make mean nothing."""
        assert rank >= self.rank
        pairs = {n: _widened(t, rank - self.rank, is_b=".lora_B" in n) for n, t in self.pairs.items()}
        experts = {
            root: tuple(
                tuple(_widened(t, rank - self.rank, is_b=i == 1) for i, t in enumerate(w)) for w in both
            )
            for root, both in self.experts.items()
        }
        config = self.config | {"r": rank, "lora_alpha": self.scale * rank}
        return Adapter(config, pairs, experts, self.is_interleaved)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Rewrite:
    """Tensors without PEFT's prefix, and the configuration. `shards` files hold them."""

    tensors: Tensors
    config: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = PREFIX
    shards: int = 1

    def write(self, directory: Path) -> Path:
        """As a PEFT directory."""
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_text(json.dumps(self.config))
        tensors = {self.prefix + name: value.clone().contiguous() for name, value in self.tensors.items()}
        if self.shards == 1:
            save_file(tensors, directory / "adapter_model.safetensors")
            return directory
        weight_map: dict[str, str] = {}
        for number in range(self.shards):
            file = f"adapter_model-{number + 1:05}-of-{self.shards:05}.safetensors"
            part = dict(list(tensors.items())[number :: self.shards])
            save_file(part, directory / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "adapter_model.safetensors.index.json").write_text(json.dumps(index))
        return directory


def take_apart(directory: Path, schema: LoraSchema, *, is_exchanged: bool) -> Adapter:
    """Read a fixture adapter that PEFT wrote with `target_parameters`, or one without experts.

    Args:
        directory: its files.
        schema: the base model's, for the number of experts.
        is_exchanged: lora_A of the experts is on the output side.
    """
    config = json.loads((directory / "adapter_config.json").read_text())
    config = {k: v for k, v in config.items() if v is not None}
    assert not config.get("rank_pattern")
    tensors = {
        k.removeprefix(PREFIX): v for k, v in load_file(directory / "adapter_model.safetensors").items()
    }
    sites = [s for s in schema.sites if s.kind is SiteKind.EXPERTS]
    packed: dict[str, dict[str, torch.Tensor]] = {}
    pairs: Tensors = {}
    for name, tensor in tensors.items():
        module, _, side = name.partition(".lora_")
        root = module.removesuffix(".base_layer")
        if root.endswith(".experts"):
            packed.setdefault(root, {})[f"{'down' if root == module else 'gate_up'} {side[0]}"] = tensor
        else:
            pairs[name] = tensor
    experts = {
        root: tuple(
            _unpacked(both[f"{key} A"], both[f"{key} B"], sites[0].num_experts, is_exchanged=is_exchanged)
            for key in ("gate_up", "down")
        )
        for root, both in packed.items()
    }
    is_interleaved = any(s.row_order is RowOrder.INTERLEAVED for s in sites)
    return Adapter(config, pairs, experts, is_interleaved)  # pyright: ignore[reportArgumentType]


def _unpacked(a: torch.Tensor, b: torch.Tensor, num_experts: int, *, is_exchanged: bool) -> Weights:
    """From PEFT's packing: A by expert, B by rank."""
    rank = a.shape[0] // num_experts
    a = a.reshape(num_experts, rank, -1)
    b = b.reshape(-1, rank, num_experts).permute(2, 0, 1)
    return (b.transpose(1, 2), a.transpose(1, 2)) if is_exchanged else (a, b)


def _widened(tensor: torch.Tensor, more: int, *, is_b: bool) -> torch.Tensor:
    """More rows of ones for A (its second axis from the end), more zero columns for B (its last)."""
    if is_b:
        return torch.cat([tensor, tensor.new_zeros(*tensor.shape[:-1], more)], -1)
    return torch.cat([tensor, tensor.new_ones(*tensor.shape[:-2], more, tensor.shape[-1])], -2)


def layouts(adapter: Adapter) -> dict[str, Rewrite]:
    """Every layout of the experts, each packing and orientation; the packing is said where it must be."""
    return {
        f"layout-{name}": Rewrite(
            adapter.pairs | adapter.laid_out(name),
            adapter.config | (_MARKER if name.endswith("expert-major") else {}),
        )
        for name in LAYOUTS
    }


def orientations(adapter: Adapter) -> dict[str, Rewrite]:
    """Both sides of lora_A, whatever PEFT version the file names: the shapes tell."""
    return {
        f"{layout}-by-{version or 'none'}": Rewrite(
            adapter.pairs | adapter.laid_out(layout), _without(adapter.config, "peft_version") | written
        )
        for layout in ("peft-fused", "peft-fused-exchanged")
        for version in ("", "0.18.1", "0.19.0", "0.19.1", "0.21.2")
        for written in [{"peft_version": version} if version else {}]
    }


def ranks(adapter: Adapter) -> dict[str, Rewrite]:
    """Ranks that are no power of two, and a rank of its own for every module."""
    wider = {rank: adapter.widened(rank) for rank in (adapter.rank + 1, 24, 33, 48, 64)}
    return {f"rank-{rank}": Rewrite(other.fused(), other.config) for rank, other in wider.items()}


def scales(adapter: Adapter) -> dict[str, Rewrite]:
    """Rank-stabilised scale, also of a rank that a pattern gives, and alphas that patterns give."""
    root, wide = math.sqrt(adapter.rank), adapter.widened(33)
    config = adapter.config | {"use_rslora": True}
    by_pattern = {"r": 2, "rank_pattern": {".*": 33}}
    return {
        "rslora": Rewrite(adapter.fused(), config | {"lora_alpha": adapter.scale * root}),
        "rslora-per-expert": Rewrite(
            adapter.pairs | adapter.laid_out("per-expert"), config | {"lora_alpha": adapter.scale * root}
        ),
        "rslora-of-a-pattern": Rewrite(
            wide.fused(), config | by_pattern | {"lora_alpha": adapter.scale * math.sqrt(33)}
        ),
        "alpha-of-a-pattern": Rewrite(
            adapter.fused(),
            adapter.config | {"lora_alpha": 1, "alpha_pattern": {".*": adapter.config["lora_alpha"]}},
        ),
        "rslora-alpha-of-a-pattern": Rewrite(
            wide.fused(),
            config | by_pattern | {"lora_alpha": 1, "alpha_pattern": {"(.*)": adapter.scale * math.sqrt(33)}},
        ),
    }


def coverage(adapter: Adapter) -> dict[str, Rewrite]:
    """target_modules in every form; the tensors say what is covered."""
    tensors = adapter.fused()
    layers = sorted({int(m.split(".")[2]) for m in adapter.modules if m.startswith("model.layers.")})
    said: dict[str, Mapping[str, Any]] = {
        "all-linear": {"target_modules": "all-linear"},
        "regex": {"target_modules": r".*\.(self_attn|mlp|feed_forward)\..*_proj"},
        "dotted": {"target_modules": adapter.modules},
        "incomplete": {"target_modules": ["q_proj"]},
        "of-other-modules": {"target_modules": ["q_proj", "fc1", "lm_head"], "exclude_modules": ["o_proj"]},
        "layers": {"layers_to_transform": layers, "layers_pattern": "layers"},
        "one-layer-said": {"layers_to_transform": 0},
        "nothing": {"target_modules": None},
    }
    return {f"targets-{name}": Rewrite(tensors, adapter.config | more) for name, more in said.items()}


def files(adapter: Adapter) -> dict[str, Rewrite]:
    """Names, dtypes and files that differ, and mean the same."""
    tensors = adapter.fused()
    named = {n.replace(".weight", ".default.weight"): t for n, t in tensors.items()}
    return {
        "float32": Rewrite({n: t.float() for n, t in tensors.items()}, adapter.config),
        "float64": Rewrite({n: t.double() for n, t in tensors.items()}, adapter.config),
        "mixed-dtypes": Rewrite(
            {n: t.float() if i % 2 else t for i, (n, t) in enumerate(tensors.items())}, adapter.config
        ),
        "adapter-name": Rewrite(named, adapter.config),
        "no-prefix": Rewrite(tensors, adapter.config, prefix=""),
        "three-shards": Rewrite(tensors, adapter.config, shards=3),
    }


def _without(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k != key}


WAYS: dict[str, Callable[[Adapter], dict[str, Rewrite]]] = {
    "layouts": layouts,
    "orientations": orientations,
    "ranks": ranks,
    "scales": scales,
    "coverage": coverage,
    "files": files,
}
