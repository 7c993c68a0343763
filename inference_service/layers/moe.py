"""A mixture-of-experts layer: router, experts, and both with LoRA."""

from dataclasses import dataclass
from typing import Protocol

import torch

from inference_service.layers.batch import LoraBatch
from inference_service.layers.linear import Linear
from inference_service.layers.projected import Projected
from inference_service.layers.shared_expert import SharedExpert
from lorikeet_kernels.dense.gated_activation import GatedActivation, gated_activation
from lorikeet_kernels.dense.row_order import RowOrder
from lorikeet_kernels.experts.expert_linear import ExpertWeight, expert_linear
from lorikeet_kernels.experts.moe_experts import ExpertProjection, ExpertsLora, moe_experts
from lorikeet_kernels.experts.moe_sum import SharedRows, moe_sum
from lorikeet_kernels.experts.mxfp4 import Mxfp4Weight
from lorikeet_kernels.experts.mxfp4_layout import Mxfp4DeviceWeight
from lorikeet_kernels.experts.router_logits import LogitParts, router_in_parts
from lorikeet_kernels.experts.routing import MAX_LORA_ROWS, RouterLora
from lorikeet_kernels.lora.moe_groups import make_moe_groups
from lorikeet_kernels.lora.moe_lora import moe_lora_down, moe_lora_gate_up


class Routing(Protocol):
    """Logits [T, E] to topk_weights [T, K] float32 and topk_ids [T, K] int32."""

    def __call__(
        self,
        logits: torch.Tensor | LogitParts,
        *,
        lora: RouterLora | None = None,
        source_rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `lorikeet_kernels.experts.routing`, also for `lora` and `source_rows`."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertSites:
    """Table indices of the sites "gate_up" and "down"."""

    gate_up: int
    down: int


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """One projection of all experts: weight [E, out, in], maybe packed, and maybe a bias [E, out].

    Packed weights are as released on a CPU, and laid out for the kernels on a GPU.
    """

    weight: ExpertWeight | Mxfp4DeviceWeight
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
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        lora: LoraBatch,
        shared: SharedRows | None = None,
    ) -> torch.Tensor:
        """[T, H] to [T, H]: each token through its own experts, weighted and summed, `shared` added."""
        if x.device.type != "cpu":
            return self._on_gpu(x, topk_weights, topk_ids, lora, shared)
        gate_up_weight, down_weight = self.gate_up.weight, self.down.weight
        assert not isinstance(gate_up_weight, Mxfp4DeviceWeight)
        assert not isinstance(down_weight, Mxfp4DeviceWeight)
        segments, tables = lora.segments, lora.tables
        num_experts, num_rows, hidden = gate_up_weight.shape
        groups = make_moe_groups(topk_ids, segments, num_experts)
        gate_up = x.new_empty((*topk_ids.shape, num_rows))
        expert_linear(
            x,
            gate_up_weight,
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
            down_weight,
            groups,
            down,
            bias=self.down.bias,
            topk_weights=topk_weights,
            batch_invariant=self.batch_invariant,
        )
        if lora.is_active:
            moe_lora_down(down, activated, topk_ids, topk_weights, groups, segments, tables, self.sites.down)
        return moe_sum(down, shared)

    def _on_gpu(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        lora: LoraBatch,
        shared: SharedRows | None,
    ) -> torch.Tensor:
        gate_up, down = self.gate_up.weight, self.down.weight
        assert not isinstance(gate_up, Mxfp4Weight)
        assert not isinstance(down, Mxfp4Weight)
        adapters = ExpertsLora(
            lora.segments, lora.tables, self.sites.gate_up, self.sites.down, side=lora.side
        )
        return moe_experts(
            x,
            topk_weights,
            topk_ids,
            ExpertProjection(gate_up, self.gate_up.bias, self.row_order),
            ExpertProjection(down, self.down.bias, None),
            self.activation,
            lora=adapters if lora.is_active else None,
            shared=shared,
            batch_invariant=self.batch_invariant,
        )


class Moe:
    """Router projection, routing rule, experts. A router adapter changes where its tokens go.

    With `scales_input` a token's one expert sees it times the routing weight, and so does its adapter.
    """

    def __init__(
        self,
        router: Linear,
        routing: Routing,
        experts: Experts,
        *,
        shared: SharedExpert | None = None,
        scales_input: bool = False,
    ) -> None:
        self.router = router
        self.routing = routing
        self.experts = experts
        self.shared = shared
        self.scales_input = scales_input

    def __call__(
        self, x: torch.Tensor, lora: LoraBatch, source_rows: torch.Tensor | None = None
    ) -> Projected:
        """[T, H] to [T, H]; where `source_rows` [T] are given, row t is routed as that row is."""
        shared = None if self.shared is None else self.shared(x, lora)
        logits, adapters = self._logits(x, lora)
        topk_weights, topk_ids = self.routing(logits, lora=adapters, source_rows=source_rows)
        routed = x
        if self.scales_input:
            routed = (x * topk_weights).to(x.dtype)
            topk_weights = torch.ones_like(topk_weights)
        return Projected(self.experts(routed, topk_weights, topk_ids, lora, shared))

    def _logits(
        self, x: torch.Tensor, lora: LoraBatch
    ) -> tuple[torch.Tensor | LogitParts, RouterLora | None]:
        """The router's logits, and its adapters where routing adds them."""
        if lora.is_active and x.shape[0] > MAX_LORA_ROWS:
            return self.router(x, lora), None
        (site,) = self.router.sites.indices
        adapters = RouterLora(x, lora.segments, lora.tables, site) if lora.is_active else None
        weight = self.router.weight
        if isinstance(weight, torch.Tensor) and not self.router.batch_invariant:
            parts = router_in_parts(x, weight, self.router.bias)
            if parts is not None:
                return parts, adapters
        return self.router.base(x), adapters
