"""A mixture-of-experts layer: router, experts, and both with LoRA."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from inference_service.layers.batch import LoraBatch
from inference_service.layers.linear import Linear
from lorikeet_kernels.expert_linear import expert_linear
from lorikeet_kernels.moe_groups import make_moe_groups
from lorikeet_kernels.moe_lora import moe_lora_down, moe_lora_gate_up
from lorikeet_kernels.moe_sum import moe_sum
from lorikeet_kernels.row_order import RowOrder
from lorikeet_kernels.silu_mul import silu_mul

Routing = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Logits [T, E] to topk_weights [T, K] float32 and topk_ids [T, K] int32."""


@dataclass(frozen=True, slots=True)
class ExpertSites:
    """Table indices of the sites "gate_up" and "down"."""

    gate_up: int
    down: int


class Experts:
    """gate_up [E, 2I, H] in `row_order`, down [E, H, I]."""

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        sites: ExpertSites,
        row_order: RowOrder,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.gate_up = gate_up
        self.down = down
        self.sites = sites
        self.row_order: RowOrder = row_order
        self.batch_invariant = batch_invariant

    def __call__(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, lora: LoraBatch
    ) -> torch.Tensor:
        """[T, H] to [T, H]: each token through its own experts, weighted and summed."""
        segments, tables = lora.segments, lora.tables
        num_experts, num_rows, hidden = self.gate_up.shape
        groups = make_moe_groups(topk_ids, segments, num_experts)
        gate_up = x.new_empty((*topk_ids.shape, num_rows))
        expert_linear(x, self.gate_up, groups, gate_up, batch_invariant=self.batch_invariant)
        if lora.is_active:
            moe_lora_gate_up(
                gate_up, x, topk_ids, groups, segments, tables, self.sites.gate_up, self.row_order
            )
        activation = silu_mul(gate_up, interleaved=self.row_order == "interleaved")
        down = x.new_empty((*topk_ids.shape, hidden))
        expert_linear(
            activation,
            self.down,
            groups,
            down,
            topk_weights=topk_weights,
            batch_invariant=self.batch_invariant,
        )
        if lora.is_active:
            moe_lora_down(down, activation, topk_ids, topk_weights, groups, segments, tables, self.sites.down)
        return moe_sum(down)


class Moe:
    """Router projection, routing rule, experts. A router adapter changes where its tokens go."""

    def __init__(self, router: Linear, routing: Routing, experts: Experts) -> None:
        self.router = router
        self.routing = routing
        self.experts = experts

    def __call__(self, x: torch.Tensor, lora: LoraBatch) -> torch.Tensor:
        """[T, H] to [T, H]."""
        topk_weights, topk_ids = self.routing(self.router(x, lora))
        return self.experts(x, topk_weights, topk_ids, lora)
