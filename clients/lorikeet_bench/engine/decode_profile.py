"""What a decode step is made of, as an engine process writes it and a command shows it. Pure."""

import re

import msgspec


class OpTime(msgspec.Struct, frozen=True):
    """One kernel on a GPU, or one operator on a CPU: calls and microseconds of one step, on average."""

    name: str
    calls: float
    us: float


class GapTime(msgspec.Struct, frozen=True):
    """The device's idle time between two kernels that follow each other, of one step on average."""

    after: str
    before: str
    count: float
    us: float


class DecodeProfile(msgspec.Struct, frozen=True):
    """Averages over `steps` decode steps of `rows` requests that name `adapters` distinct adapters.

    `step_us` was measured before the profiler ran, from one launch to the next; `busy_us` and `gap_us` are
    the device's time with and without a kernel under the profiler, which slows the host, not the device. On
    a CPU `busy_us` is all operators' own time, and there are no gaps.
    """

    device: str
    steps: int
    rows: int
    adapters: int
    step_us: float
    busy_us: float
    gap_us: float
    ops: tuple[OpTime, ...]
    gaps: tuple[GapTime, ...] = ()

    def by_part(self) -> dict[str, float]:
        """Microseconds of one step by part of the model; what no pattern knows is "other"."""
        found: dict[str, float] = {}
        for op in self.ops:
            part = part_of(op.name)
            found[part] = found.get(part, 0.0) + op.us
        return dict(sorted(found.items(), key=lambda item: -item[1]))


# First match wins. The lm_head's GEMM goes by the same kernels as attention's projections.
_PARTS = (
    ("adapters", r"lora|segment|grouped_shrink|grouped_expand|_(count|scan|scatter)_kernel"),
    ("experts", r"mxfp4|expert_gemm|expert_linear|moe_sum|gated_activation|_place_kernel"),
    ("routing", r"route|topk|softmax"),
    ("attention", r"paged|^_decode_kernel|^_merge_kernel|^_attend|attention|scaled_dot"),
    ("norms, rotation, cache", r"rms_norm|norm|rotary|kv_write|attention_inputs"),
    (
        "sampling",
        r"largest|draw|mass|first_kernel|next_kernel|finish_kernel|sample|argmax|penal|bitmask|pending",
    ),
    ("projections, lm_head", r"gemm|gemv|cublas|cutlass|nvjet|splitk|addmm|aten::mm|matmul|linear"),
    ("copies", r"memcpy|memset|aten::copy_|copy_kernel|index|cat"),
)
_COMPILED = tuple((part, re.compile(pattern, re.IGNORECASE)) for part, pattern in _PARTS)


def part_of(name: str) -> str:
    """The part of the model that a kernel or operator belongs to, by its name."""
    return next((part for part, pattern in _COMPILED if pattern.search(name)), "other")
