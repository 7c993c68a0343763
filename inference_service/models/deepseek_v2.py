"""DeepSeek-V2: greedy softmax routing, maybe within the best groups of experts."""

from inference_service.models import deepseek, standard_parts
from inference_service.models.config import ConfigReader
from inference_service.models.spec import GroupedSoftmaxRouting, ModelSpec

ARCHITECTURES = ("DeepseekV2ForCausalLM",)
MODEL_TYPES = ("deepseek_v2",)
_GREEDY, _GROUPED = "greedy", "group_limited_greedy"


def declare(config: ConfigReader) -> ModelSpec:
    """The model that a DeepSeek-V2 config describes."""
    config.require("scoring_func", ("softmax",), "softmax")
    config.require("topk_method", (_GREEDY, _GROUPED), _GREEDY)
    # The released models do not normalise, and implementations differ on what it would mean.
    config.require("norm_topk_prob", (False,), default=False)
    return deepseek.declare(config, _routing, is_pairwise=True)


def _routing(config: ConfigReader, router: str, num_experts: int) -> GroupedSoftmaxRouting:
    del router
    is_grouped = config.text("topk_method", _GREEDY) == _GROUPED
    num_groups, top_k_groups = deepseek.expert_groups(config, num_experts) if is_grouped else (1, 1)
    return GroupedSoftmaxRouting(
        top_k=standard_parts.experts_per_token(config, num_experts),
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        scale=config.number("routed_scaling_factor", 1.0),
    )
