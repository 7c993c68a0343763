"""The models that the families' benches run, one of each family that is served on one GPU."""

from dataclasses import dataclass

INPUT_TOKENS = 512
RANK, ADAPTERS = 16, 8
DENSE = ("q", "k", "v", "o", "mlp_gate_up", "mlp_down")
EXPERTS = ("q", "k", "v", "o", "gate_up", "down")
TINY = (
    "num_hidden_layers=2",
    "hidden_size=128",
    "intermediate_size=128",
    "vocab_size=512",
    "eos_token_id=500",
)


@dataclass(frozen=True)
class Model:
    """A shape, the sites that its adapters are on, and what makes a toy of it (FP8 blocks are 128 wide).

    `expected_s` is what its bench should take on one H200, the start included. `kinds` layers have all that
    its layers differ in.
    """

    shape: str
    expected_s: float
    sites: tuple[str, ...]
    tiny: tuple[str, ...] = TINY
    output_tokens: int = 192
    kinds: int = 2

    @property
    def context_tokens(self) -> float:
        """Of a request while it decodes, on average."""
        return INPUT_TOKENS + self.output_tokens / 2


_TINY_MOE = (*TINY, "moe_intermediate_size=128", "bos_token_id=501")
# The cheapest and the most telling first.
MODELS = (
    Model("qwen3-30b-a3b-fp8", 35, EXPERTS, _TINY_MOE),
    Model(
        "deepseek-v2-lite",
        35,
        (
            "q",
            "kv_a",
            "kv_b",
            "o",
            "gate_up",
            "down",
            "shared_gate_up",
            "shared_down",
            "mlp_gate_up",
            "mlp_down",
        ),
        (*_TINY_MOE, "first_k_dense_replace=1"),
    ),
    Model("llama-3.3-70b-fp8", 55, DENSE, (*TINY, "bos_token_id=501"), output_tokens=96),
    Model("qwen3-30b-a3b", 45, EXPERTS, _TINY_MOE),
    Model("qwen3-32b", 50, DENSE, (*TINY, "bos_token_id=501"), output_tokens=96),
    Model(
        "llama-4-scout-fp8",
        50,
        (*EXPERTS, "shared_gate_up", "shared_down"),
        (*TINY, "intermediate_size_mlp=128", "attention_chunk_size=32", "bos_token_id=501"),
        output_tokens=96,
        kinds=4,
    ),
)
