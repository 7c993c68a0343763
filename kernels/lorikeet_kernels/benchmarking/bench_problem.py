"""Cold input sets of a MoE layer's LoRA branch, with their byte floor, for bench and tune."""

from dataclasses import dataclass

import torch

from lorikeet_kernels.dense.row_order import RowOrder
from lorikeet_kernels.lora.lora_segments import LoraSegments, make_lora_segments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.testing import SiteShape, SlotSite, make_tables

COLD_BYTES = 240_000_000  # touched by one graph: four times an H200's L2
MAX_SETS = 500
MAX_LAYERS = 60
MAX_LAYER_BYTES = 20_000_000_000  # of adapters, all layers together
MIXED_TOKENS = 256  # up to here every token is a request of its own, beyond a request is a run of tokens


@dataclass(frozen=True, slots=True)
class MoeModel:
    """A MoE layer's sizes; `num_a` 1 where gate and up share A."""

    name: str
    hidden: int
    inner: int
    num_experts: int
    top_k: int
    num_a: int
    row_order: RowOrder


@dataclass(frozen=True, slots=True)
class DenseSites:
    """A fused dense projection: `widths` are its sites' columns, side by side.

    `num_slices` says which of them are two pieces with an A each (gate and up).
    """

    name: str
    in_features: int
    widths: tuple[int, ...]
    num_slices: tuple[int, ...] = (1, 1, 1)

    @property
    def slices(self) -> tuple[int, ...]:
        """Of each site."""
        return self.num_slices[: len(self.widths)]

    @property
    def adapter_elements(self) -> int:
        """Of one adapter, for each rank."""
        return sum(self.slices) * self.in_features + sum(self.widths)


DENSE = (
    DenseSites("gpt-oss-20b qkv", 2880, (4096, 512, 512)),
    DenseSites("gpt-oss-20b o", 4096, (2880,)),
    DenseSites("qwen3-32b qkv", 5120, (8192, 1024, 1024)),
    DenseSites("qwen3-32b o", 8192, (5120,)),
    DenseSites("llama-3.3-70b qkv", 8192, (8192, 1024, 1024)),
    DenseSites("llama-3.3-70b o", 8192, (8192,)),
    DenseSites("qwen3-32b mlp_gate_up", 5120, (51200,), (2,)),
    DenseSites("qwen3-32b mlp_down", 25600, (5120,)),
    DenseSites("llama-3.3-70b mlp_gate_up", 8192, (57344,), (2,)),
    DenseSites("llama-3.3-70b mlp_down", 28672, (8192,)),
    DenseSites("qwen3-30b-a3b qkv", 2048, (4096, 512, 512)),
    DenseSites("qwen3-30b-a3b o", 4096, (2048,)),
    DenseSites("llama-4-scout qkv", 5120, (5120, 1024, 1024)),
    DenseSites("llama-4-scout o", 5120, (5120,)),
    DenseSites("llama-4-scout shared_gate_up", 5120, (16384,), (2,)),
    DenseSites("deepseek-v2-lite q", 2048, (3072,)),
    DenseSites("deepseek-v2-lite o", 2048, (2048,)),
    DenseSites("deepseek-v2-lite shared_gate_up", 2048, (5632,), (2,)),
    DenseSites("deepseek-v2-lite shared_down", 2816, (2048,)),
)

MODELS = (
    MoeModel("gpt-oss-20b", 2880, 2880, 32, 4, 1, "interleaved"),
    MoeModel("gpt-oss-120b", 2880, 2880, 128, 4, 1, "interleaved"),
    MoeModel("qwen3-30b-a3b", 2048, 768, 128, 8, 2, "concatenated"),
    MoeModel("mixtral-8x7b", 4096, 14336, 8, 2, 2, "concatenated"),
    MoeModel("deepseek-v2-lite", 2048, 1408, 64, 6, 2, "concatenated"),
    MoeModel("deepseek-v3-tp8", 7168, 256, 256, 8, 2, "concatenated"),
    MoeModel("llama4-scout", 5120, 8192, 16, 1, 2, "concatenated"),
)


@dataclass(frozen=True, slots=True)
class MoeInputs:
    """One set: activations, routing, outputs; `layer` says which of the tables' layers it uses."""

    layer: int
    segments: LoraSegments
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    x: torch.Tensor
    act: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    floor_bytes: int

    @property
    def gate_up_site(self) -> int:
        """The layer's gate_up in the tables."""
        return 2 * self.layer

    @property
    def down_site(self) -> int:
        """The layer's down in the tables."""
        return 2 * self.layer + 1


def make_layers(model: MoeModel, rank: int, num_slots: int, num_layers: int) -> LoraTables:
    """Random adapters of one rank for `num_layers` layers on the current GPU."""
    sites = [
        SiteShape(model.hidden, 2 * model.inner, model.num_experts),
        SiteShape(model.inner, model.hidden, model.num_experts),
    ] * num_layers
    slot = [SlotSite(rank, model.num_a), SlotSite(rank)] * num_layers
    return make_tables(sites, [slot] * num_slots, dtype=torch.bfloat16, device="cuda")


def make_inputs(
    model: MoeModel,
    rank: int,
    num_slots: int,
    num_tokens: int,
    layer: int,
    workspace: LoraWorkspace,
    seed: int,
) -> MoeInputs:
    """Every token draws its experts uniformly; tokens share the slots evenly."""
    generator = torch.Generator().manual_seed(seed)
    device = workspace.device
    slots = _draw_slots(num_tokens, num_slots, generator)
    scores = torch.rand(num_tokens, model.num_experts, generator=generator)
    ids = scores.topk(model.top_k, dim=1).indices.to(torch.int32)
    distinct = int(torch.unique(slots.to(torch.int64)[:, None] * model.num_experts + ids).numel())
    pairs = num_tokens * model.top_k
    weights = rank * (model.num_a * model.hidden + 2 * model.inner + model.inner + model.hidden)
    rows = num_tokens * model.hidden + pairs * (2 * 2 * model.inner + model.inner + 2 * model.hidden)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()

    return MoeInputs(
        layer=layer,
        segments=make_lora_segments(slots.to(device), num_slots, workspace),
        topk_ids=ids.to(device),
        topk_weights=torch.rand(num_tokens, model.top_k, device=device),
        x=normal(num_tokens, model.hidden),
        act=normal(num_tokens, model.top_k, model.inner),
        gate_up=normal(num_tokens, model.top_k, 2 * model.inner),
        down=normal(num_tokens, model.top_k, model.hidden),
        floor_bytes=2 * (distinct * weights + rows),
    )


@dataclass(frozen=True, slots=True)
class DenseInputs:
    """One set of a dense projection's inputs; `sites` says which of the tables' layers it uses."""

    sites: tuple[int, ...]
    segments: LoraSegments
    x: torch.Tensor
    out: torch.Tensor
    floor_bytes: int


def make_dense_layers(dense: DenseSites, rank: int, num_slots: int, num_layers: int) -> LoraTables:
    """As `make_layers`, for a dense projection."""
    sites = [SiteShape(dense.in_features, width) for width in dense.widths] * num_layers
    return make_tables(
        sites,
        [[SlotSite(rank, num_a) for num_a in dense.slices] * num_layers] * num_slots,
        dtype=torch.bfloat16,
        device="cuda",
    )


def make_dense_inputs(
    dense: DenseSites,
    rank: int,
    num_slots: int,
    num_tokens: int,
    layer: int,
    workspace: LoraWorkspace,
    seed: int,
) -> DenseInputs:
    """As `make_inputs`, for a dense projection."""
    slots = _draw_slots(num_tokens, num_slots, torch.Generator().manual_seed(seed))
    count, columns = len(dense.widths), sum(dense.widths)
    weights = rank * dense.adapter_elements
    distinct = int(torch.unique(slots).numel())
    device = workspace.device
    return DenseInputs(
        sites=tuple(range(layer * count, (layer + 1) * count)),
        segments=make_lora_segments(slots.to(device), num_slots, workspace),
        x=torch.empty((num_tokens, dense.in_features), dtype=torch.bfloat16, device=device).normal_(),
        out=torch.empty((num_tokens, columns), dtype=torch.bfloat16, device=device).normal_(),
        floor_bytes=2 * (distinct * weights + num_tokens * (dense.in_features + 2 * columns)),
    )


def _draw_slots(num_tokens: int, num_slots: int, generator: torch.Generator) -> torch.Tensor:
    used = min(num_slots, num_tokens)
    names = torch.randperm(num_slots, generator=generator)[:used]
    if num_tokens <= MIXED_TOKENS:
        which = torch.randperm(num_tokens, generator=generator) % used
    else:
        which = torch.arange(num_tokens) * used // num_tokens
    return names[which].to(torch.int32)


def num_sets(floor_bytes: int) -> int:
    """How many sets make a graph cold."""
    return max(2, min(MAX_SETS, -(-COLD_BYTES // floor_bytes)))


def num_layers(adapter_bytes: int, sets: int) -> int:
    """How many layers of adapters the sets share: as many as fit, so that weights are cold too."""
    return max(1, min(sets, MAX_LAYERS, MAX_LAYER_BYTES // adapter_bytes))
