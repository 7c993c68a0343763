"""A declared routing as the function that `Moe` calls. For `build.py`."""

from functools import partial

import torch

from inference_service.layers.moe import Routing
from inference_service.models.checkpoint import WeightSource
from inference_service.models.expert_weights import Allocate
from inference_service.models.spec import (
    GroupedSigmoidRouting,
    GroupedSoftmaxRouting,
    SigmoidRouting,
    SoftmaxRouting,
)
from inference_service.models.spec import Routing as RoutingSpec
from lorikeet_kernels.experts.routing import (
    route_sigmoid,
    route_sigmoid_grouped,
    route_softmax,
    route_softmax_grouped,
)


def routing_rule(spec: RoutingSpec, num_experts: int, source: WeightSource, allocate: Allocate) -> Routing:
    """The rule, with what it needs of the checkpoint."""
    match spec:
        case SoftmaxRouting(top_k, renormalize):
            return partial(route_softmax, top_k=top_k, renormalize=renormalize)
        case SigmoidRouting(top_k):
            return partial(route_sigmoid, top_k=top_k)
        case GroupedSoftmaxRouting(top_k, num_groups, top_k_groups, scale):
            return partial(
                route_softmax_grouped,
                top_k=top_k,
                num_groups=num_groups,
                top_k_groups=top_k_groups,
                scale=scale,
            )
        case GroupedSigmoidRouting():
            bias = allocate(num_experts, dtype=torch.float32)
            source.read_into(bias, spec.correction_bias)
            return partial(
                route_sigmoid_grouped,
                correction_bias=bias,
                top_k=spec.top_k,
                num_groups=spec.num_groups,
                top_k_groups=spec.top_k_groups,
                renormalize=spec.renormalize,
                scale=spec.scale,
            )
