"""Routing: which K experts each token goes to, and with which weight.

All maths in float32, whatever the logits' dtype. Equal scores choose the lower expert id, on every device, so that
a tie never makes two runs differ. Weights [T, K] float32, ids [T, K] int32, best first.
"""

import torch


def route_softmax_reference(
    logits: torch.Tensor, top_k: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, the K largest; `renormalize` makes the chosen weights sum to 1.

    With `renormalize` this equals a softmax over the chosen logits alone (gpt-oss, Mixtral).
    """
    scores = torch.softmax(logits.to(torch.float32), dim=1)
    weights, ids = _largest(scores, top_k)
    if renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return weights, ids.to(torch.int32)


def route_sigmoid_grouped_reference(
    logits: torch.Tensor,
    correction_bias: torch.Tensor,
    top_k: int,
    *,
    num_groups: int,
    top_k_groups: int,
    renormalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoid scores, experts chosen within the best groups by score plus bias (DeepSeek-V3).

    A group's score is the sum of its two best biased scores. The bias steers the choice only; weights are the
    plain scores, optionally made to sum to 1, times `scale`.
    """
    num_tokens, num_experts = logits.shape
    scores = torch.sigmoid(logits.to(torch.float32))
    biased = scores + correction_bias.to(torch.float32)
    grouped = biased.view(num_tokens, num_groups, num_experts // num_groups)
    group_scores = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(dim=2)
    _, chosen = _largest(group_scores, top_k_groups)
    allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, chosen, value=True)
    masked = grouped.masked_fill(~allowed[:, :, None], float("-inf")).view(num_tokens, num_experts)
    _, ids = _largest(masked, top_k)
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    return weights * scale, ids.to(torch.int32)


def route_sigmoid_reference(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The K largest logits, each weighted by its own sigmoid (Llama 4, K = 1)."""
    values, ids = _largest(logits.to(torch.float32), top_k)
    return torch.sigmoid(values), ids.to(torch.int32)


def _largest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    # topk leaves the order of equal values open; a stable sort does not
    values, ids = torch.sort(scores, dim=1, descending=True, stable=True)
    return values[:, :count].contiguous(), ids[:, :count].contiguous()


route_softmax = route_softmax_reference
route_sigmoid_grouped = route_sigmoid_grouped_reference
route_sigmoid = route_sigmoid_reference
