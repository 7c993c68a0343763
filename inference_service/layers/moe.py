"""A mixture-of-experts layer: router, experts, and both with LoRA."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from inference_service.layers.batch import LoraBatch
from inference_service.layers.linear import Linear
from lorikeet_kernels.expert_linear import ExpertWeight, expert_linear
from lorikeet_kernels.gated_activation import GatedActivation, gated_activation
from lorikeet_kernels.moe_groups import make_moe_groups
from lorikeet_kernels.moe_lora import moe_lora_down, moe_lora_gate_up
from lorikeet_kernels.moe_sum import moe_sum
from lorikeet_kernels.row_order import RowOrder

Routing = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Logits [T, E] to topk_weights [T, K] float32 and topk_ids [T, K] int32."""


@dataclass(frozen=True, slots=True)
class ExpertSites:
    """Table indices of the sites "gate_up" and "down"."""

    gate_up: int
    down: int


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """One projection of all experts: weight [E, out, in], maybe packed, and maybe a bias [E, out]."""

    weight: ExpertWeight
    bias: torch.Tensor | None = None


class Experts:
    """gate_up [E, 2I, H] in `row_order`, the activation between, down [E, H, I]."""

    def __init__(
        self,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        sites: ExpertSites,
        row_order: RowOrder,
        activation: GatedActivation,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.gate_up = gate_up
        self.down = down
        self.sites = sites
        self.row_order: RowOrder = row_order
        self.activation = activation
        self.batch_invariant = batch_invariant

    def __call__(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, lora: LoraBatch
    ) -> torch.Tensor:
        """[T, H] to [T, H]: each token through its own experts, weighted and summed."""
        segments, tables = lora.segments, lora.tables
        num_experts, num_rows, hidden = self.gate_up.weight.shape
        groups = make_moe_groups(topk_ids, segments, num_experts)
        gate_up = x.new_empty((*topk_ids.shape, num_rows))
        expert_linear(
            x,
            self.gate_up.weight,
            groups,
            gate_up,
            bias=self.gate_up.bias,
            batch_invariant=self.batch_invariant,
        )
        if lora.is_active:
            moe_lora_gate_up(
                gate_up, x, topk_ids, groups, segments, tables, self.sites.gate_up, self.row_order
            )
        activated = gated_activation(gate_up, self.activation, row_order=self.row_order)
        down = x.new_empty((*topk_ids.shape, hidden))
        expert_linear(
            activated,
            self.down.weight,
            groups,
            down,
            bias=self.down.bias,
            topk_weights=topk_weights,
            batch_invariant=self.batch_invariant,
        )
        if lora.is_active:
            moe_lora_down(down, activated, topk_ids, topk_weights, groups, segments, tables, self.sites.down)
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
