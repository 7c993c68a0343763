"""DeepSeek-V3: sigmoid scores, a correction bias that steers the choice, experts within the best groups."""

from inference_service.models import deepseek, standard_parts
from inference_service.models.config import ConfigReader
from inference_service.models.spec import GroupedSigmoidRouting, ModelSpec

ARCHITECTURES = ("DeepseekV3ForCausalLM",)
MODEL_TYPES = ("deepseek_v3",)


def declare(config: ConfigReader) -> ModelSpec:
    """The model that a DeepSeek-V3 config describes."""
    config.require("scoring_func", ("sigmoid",), "sigmoid")
    config.require("topk_method", ("noaux_tc",), "noaux_tc")
    is_pairwise = config.boolean("rope_interleave", default=True)
    return deepseek.declare(config, _routing, is_pairwise=is_pairwise)


def _routing(config: ConfigReader, router: str, num_experts: int) -> GroupedSigmoidRouting:
    num_groups, top_k_groups = deepseek.expert_groups(config, num_experts)
    return GroupedSigmoidRouting(
        top_k=standard_parts.experts_per_token(config, num_experts),
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        renormalize=config.boolean("norm_topk_prob", default=True),
        scale=config.number("routed_scaling_factor"),
        correction_bias=f"{router}.e_score_correction_bias",
    )
