"""The same expert weights in every layout that trainers use: a [E, r, in], b [E, out, r] per parameter."""

from collections.abc import Callable

import torch

Tensors = dict[str, torch.Tensor]
Weights = tuple[torch.Tensor, torch.Tensor]

# (root module, gate_up weights, down weights) -> tensors without PEFT's prefix.
LayoutWriter = Callable[[str, Weights, Weights], Tensors]


def pair(module: str, a: torch.Tensor, b: torch.Tensor) -> Tensors:
    """Both tensors of a module."""
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def packed(a: torch.Tensor, b: torch.Tensor, *, is_expert_major: bool = False) -> Weights:
    """PEFT's packing: A by expert, B by rank (or by expert, as some trainers have it)."""
    rows = a.reshape(-1, a.shape[2])
    order = (1, 0, 2) if is_expert_major else (1, 2, 0)
    return rows, b.permute(order).reshape(b.shape[1], -1)


def exchanged(a: torch.Tensor, b: torch.Tensor) -> Weights:
    """A on the output side: y += s A_e^T (B_e^T x)."""
    return packed(b.transpose(1, 2), a.transpose(1, 2))


def peft_fused(root: str, gate_up: Weights, down: Weights) -> Tensors:
    """Layout 1."""
    return pair(f"{root}.base_layer", *packed(*gate_up)) | pair(root, *packed(*down))


def peft_fused_exchanged(root: str, gate_up: Weights, down: Weights) -> Tensors:
    """Layout 2."""
    return pair(f"{root}.base_layer", *exchanged(*gate_up)) | pair(root, *exchanged(*down))


def expert_major(root: str, gate_up: Weights, down: Weights) -> Tensors:
    """Layout 6."""
    return pair(f"{root}.base_layer", *packed(*gate_up, is_expert_major=True)) | pair(
        root, *packed(*down, is_expert_major=True)
    )


def per_expert(root: str, gate_up: Weights, down: Weights) -> Tensors:
    """Layout 3, with gate and up from concatenated rows."""
    return _listed(root, gate_up, down, ("gate_proj", "up_proj", "down_proj"))


def w123(root: str, gate_up: Weights, down: Weights) -> Tensors:
    """Layout 4."""
    return _listed(root, gate_up, down, ("w1", "w3", "w2"))


def unsloth_projs(root: str, gate_up: Weights, down: Weights) -> Tensors:
    """Layout 5."""
    tensors: Tensors = {}
    for name, (a, b) in (("gate_up_projs", gate_up), ("down_projs", down)):
        for expert in range(a.shape[0]):
            tensors |= pair(f"{root}.{name}.{expert}", a[expert], b[expert])
    return tensors


def stacked(root: str, gate_up: Weights, down: Weights) -> Tensors:
    """Layout 7."""
    return pair(f"{root}.gate_up_proj", *gate_up) | pair(f"{root}.down_proj", *down)


def stacked_w123(root: str, gate_up: Weights, down: Weights) -> Tensors:
    """Layout 8 with one pair for each expert."""
    a, b = gate_up
    half = b.shape[1] // 2
    return pair(f"{root}.w1", a, b[:, :half]) | pair(f"{root}.w3", a, b[:, half:]) | pair(f"{root}.w2", *down)


def _listed(root: str, gate_up: Weights, down: Weights, names: tuple[str, str, str]) -> Tensors:
    (a, b), half = gate_up, gate_up[1].shape[1] // 2
    tensors: Tensors = {}
    for expert in range(a.shape[0]):
        tensors |= pair(f"{root}.{expert}.{names[0]}", a[expert], b[expert, :half])
        tensors |= pair(f"{root}.{expert}.{names[1]}", a[expert], b[expert, half:])
        tensors |= pair(f"{root}.{expert}.{names[2]}", down[0][expert], down[1][expert])
    return tensors


LAYOUTS: dict[str, LayoutWriter] = {
    "peft-fused": peft_fused,
    "peft-fused-exchanged": peft_fused_exchanged,
    "peft-fused-expert-major": expert_major,
    "per-expert": per_expert,
    "w123": w123,
    "per-expert-fused": unsloth_projs,
    "stacked-3d": stacked,
    "stacked-w123": stacked_w123,
}
