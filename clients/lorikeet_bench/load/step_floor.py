"""What one decode step must read, by what it is, and the time that takes at the least."""

from dataclasses import dataclass

from lorikeet_bench.load.model_part import ModelPart

# One H200: copy bandwidth as measured with the kernels, and what dense multiplications reach at best.
BYTES_PER_S = 4.3e12
FLOPS = 790e12
FP8_FLOPS = 1580e12


@dataclass(frozen=True, slots=True)
class DecodeStepBytes:
    """Bytes that one decode step reads. `dense` are attention's projections and the router."""

    dense: float
    experts: float
    lm_head: float
    adapters: float
    kv_cache: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.experts + self.lm_head + self.adapters + self.kv_cache

    @property
    def seconds(self) -> float:
        """At the card's copy bandwidth."""
        return self.total / BYTES_PER_S

    def by_part(self) -> dict[ModelPart, float]:
        """Seconds at the least of each part; those whose bytes are left out have none."""
        found = {
            ModelPart.EXPERTS: self.experts,
            ModelPart.PROJECTIONS: self.dense,
            ModelPart.LM_HEAD: self.lm_head,
            ModelPart.ADAPTERS: self.adapters,
            ModelPart.ATTENTION: self.kv_cache,
        }
        return {part: num_bytes / BYTES_PER_S for part, num_bytes in found.items()}
