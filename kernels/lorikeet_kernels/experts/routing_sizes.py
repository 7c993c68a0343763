"""What the routing rules ask of their sizes: beyond them a kernel would read other tensors' memory."""

import torch


def check_sizes(
    shape: torch.Size,
    top_k: int,
    *,
    num_groups: int = 1,
    top_k_groups: int = 1,
    correction_bias: torch.Tensor | None = None,
) -> None:
    """Raise ValueError unless logits of `shape` [T, E] have `top_k` experts to choose, in equal groups."""
    if len(shape) != 2:
        raise ValueError(f"routing: logits {tuple(shape)} must be [T, E]")
    num_experts = shape[1]
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"routing: {num_experts} experts do not make {num_groups} equal groups")
    if not 1 <= top_k_groups <= num_groups:
        raise ValueError(f"routing: {top_k_groups} of {num_groups} groups cannot be chosen")
    choice = num_experts // num_groups * top_k_groups
    if not 1 <= top_k <= choice:
        raise ValueError(f"routing: {top_k} of {choice} experts cannot be chosen")
    if correction_bias is not None and correction_bias.shape != shape[1:]:
        raise ValueError(f"routing: bias {tuple(correction_bias.shape)} does not fit {num_experts} experts")
