"""Which part of a model a kernel belongs to, by its name: of lorikeet_kernels, torch and cuBLAS."""

import re

from lorikeet_bench.load.model_part import ModelPart

# First match wins.
_PATTERNS = (
    (
        ModelPart.ADAPTERS,
        # "few_rows_lora" and the like are launches of the base that make adapters' deltas, too
        r"(?<!(?:_rows|heads|_gemm)_)lora|register_segments|grouped_(shrink|expand)|^_(count|scan|scatter)_kernel",
    ),
    (ModelPart.EXPERTS, r"mxfp4|expert_gemm|^_fp8_(gemm|specialized|ranged)|moe_sum|gated_activation"),
    (ModelPart.QUANTIZED, r"^_quantize"),
    (
        ModelPart.PROJECTIONS,
        r"few_rows|few_heads|dense_fp8|split_sum|router_logits|gemm|gemv|cublas|cutlass|nvjet|splitk|addmm|aten::b?mm|matmul|linear",
    ),
    (ModelPart.ROUTING, r"_route_|_count_experts|_place_kernel|topk|softmax"),
    (ModelPart.NORMS, r"norm|rotary|kv_write|attention_inputs|latent_inputs"),
    (ModelPart.ATTENTION, r"paged|^_(ring_)?(decode|merge|prefill|prompt)_kernel|attention|scaled_dot|flash"),
    (
        ModelPart.SAMPLING,
        r"^_(largest|draw|mass|first|next|finish|count_digits|digit|end)_kernel|sample|argmax|penal|bitmask|pending|sort",
    ),
    (ModelPart.COPIES, r"memcpy|memset|copy|index|cat|gather|scatter|elementwise|fill|reduce|embedding"),
)
_COMPILED = tuple((part, re.compile(pattern, re.IGNORECASE)) for part, pattern in _PATTERNS)


def part_of(name: str) -> ModelPart:
    """The part of a kernel or operator by its name alone; what no pattern knows is `OTHER`."""
    return next((part for part, pattern in _COMPILED if pattern.search(name)), ModelPart.OTHER)
