"""From a declared model and a source of weights to layers that compute."""

from collections import deque
from collections.abc import Iterator, Mapping

import torch

from inference_service.layers.attention import Attention, AttentionShape, HeadNorm, Positions
from inference_service.layers.decoder import Decoder, DecoderLayer
from inference_service.layers.dense_mlp import DenseMlp
from inference_service.layers.embedding import Embedding
from inference_service.layers.latent_attention import LatentAttention, LatentQuery, LatentShape
from inference_service.layers.linear import Linear, LinearSites
from inference_service.layers.moe import ExpertLinear, Experts, ExpertSites, Moe
from inference_service.layers.norm import RmsNorm
from inference_service.layers.projection_norm import ProjectionNorm
from inference_service.layers.query_temperature import temperature_factors
from inference_service.layers.rope import RopeParameters, rope_table
from inference_service.layers.shared_expert import SharedExpert
from inference_service.models.attention_spec import (
    AttentionSpec,
    HeadNormSpec,
    LatentAttentionSpec,
    UnitNormSpec,
)
from inference_service.models.checkpoint import WeightSource
from inference_service.models.errors import ModelConfigError
from inference_service.models.expert_weights import (
    StoredExperts,
    laid_out,
    read_expert_linear,
    row_order_name,
)
from inference_service.models.fp8_weights import Fp8Reader, Fp8Shape, read_modules
from inference_service.models.linear_spec import LinearSpec, Module, SiteSpec
from inference_service.models.routing_rule import routing_rule
from inference_service.models.spec import (
    DenseMlpSpec,
    ExpertLinearSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    SharedExpertSpec,
)
from lorikeet_kernels.attention.latent_attention import NEVER_FRESH
from lorikeet_kernels.attention.prompt_attention import longest_absorbed
from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.dense.row_order import RowOrder
from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.tiling.latent_tiles import projects_prompts


class ModelBuilder:
    """Builds one model. Parameters are made on the device in the compute dtype and filled by the source.

    Args:
        spec: the declared model.
        source: where weights come from; its `finish` is the caller's to call.
        site_indices: index in the LoRA tables by site name.
        dtype: compute dtype.
        device: where parameters live.
        num_positions: positions the rotary tables cover.
        batch_invariant: a row's bits must not depend on the batch's size.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        site_indices: Mapping[str, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_positions: int,
        batch_invariant: bool,
    ) -> None:
        self._spec = spec
        self._source = source
        self._site_indices = site_indices
        self._dtype = dtype
        self._device = device
        self._num_positions = num_positions
        self._batch_invariant = batch_invariant
        self._rope_tables: dict[RopeParameters, torch.Tensor] = {}
        self._stored_experts = self._read_experts()

    def build(self) -> Decoder:
        """The model, weights loaded."""
        spec = self._spec
        embed_weight = self._read(spec.embed_weight, spec.vocab_size, spec.hidden_size)
        tied = spec.lm_head_weight == spec.embed_weight
        head_weight = (
            embed_weight if tied else self._read(spec.lm_head_weight, spec.vocab_size, spec.hidden_size)
        )
        head_sites = LinearSites((self._site_indices["lm_head"],), (spec.vocab_size,), (1,))
        return Decoder(
            Embedding(embed_weight, self._site_indices["embed"]),
            [self._layer(f"layers.{index}", layer) for index, layer in enumerate(spec.layers)],
            self._norm(spec.final_norm),
            Linear(head_weight, None, head_sites, batch_invariant=self._batch_invariant),
            embedding_factor=spec.multipliers.embedding,
            residual_factor=spec.multipliers.residual,
            logits_factor=spec.multipliers.logits,
        )

    def _layer(self, name: str, spec: LayerSpec) -> DecoderLayer:
        mlp, attention = spec.mlp, spec.attention
        return DecoderLayer(
            self._norm(spec.input_norm),
            self._attention(name, attention)
            if isinstance(attention, AttentionSpec)
            else self._latent_attention(name, attention),
            self._norm(spec.mlp_norm),
            self._dense_mlp(name, mlp) if isinstance(mlp, DenseMlpSpec) else self._moe(name, mlp),
        )

    def _attention(self, name: str, spec: AttentionSpec) -> Attention:
        return Attention(
            AttentionShape(
                spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale, spec.window, spec.chunk
            ),
            self._linear(name, spec.qkv),
            self._linear(name, spec.o),
            positions=self._positions(spec),
            head_norm=None if spec.head_norm is None else self._head_norm(spec, spec.head_norm),
            projection_norm=self._projection_norm(spec),
            sinks=None if spec.sinks is None else self._read(spec.sinks, spec.num_heads),
        )

    def _positions(self, spec: AttentionSpec) -> Positions:
        factors = None
        if (of := spec.temperature) is not None:
            factors = temperature_factors(of.strength, of.interval, self._num_positions, self._device)
        table = None if spec.rope is None else self._rope_table(spec.rope)
        return Positions(table, spec.is_pairwise, factors)

    def _head_norm(self, spec: AttentionSpec, norm: HeadNormSpec | UnitNormSpec) -> HeadNorm:
        if isinstance(norm, UnitNormSpec):
            weight = self._empty(spec.num_heads + spec.num_kv_heads, spec.head_dim).fill_(1.0)
            return HeadNorm(weight, self._spec.norm_eps, spec.norms_rotated)
        rows = [
            self._read(name, spec.head_dim).expand(count, -1)
            for name, count in ((norm.q_weight, spec.num_heads), (norm.k_weight, spec.num_kv_heads))
        ]
        self._source.wait(norm.q_weight, norm.k_weight)
        return HeadNorm(torch.cat(rows), self._spec.norm_eps, spec.norms_rotated)

    def _projection_norm(self, spec: AttentionSpec) -> ProjectionNorm | None:
        if (norm := spec.projection_norm) is None:
            return None
        q, k = (
            self._read(name, count * spec.head_dim)
            for name, count in ((norm.q_weight, spec.num_heads), (norm.k_weight, spec.num_kv_heads))
        )
        return ProjectionNorm(q, k, self._spec.norm_eps)

    def _latent_attention(self, name: str, spec: LatentAttentionSpec) -> LatentAttention:
        query = None
        if spec.q_up is not None and spec.q_norm is not None:
            norm = RmsNorm(self._read(spec.q_norm, spec.q_up.in_features), spec.latent_eps)
            query = LatentQuery(norm, self._linear(name, spec.q_up))
        return LatentAttention(
            LatentShape(
                spec.num_heads,
                spec.latent_dim,
                spec.plain_dim,
                spec.rope_dim,
                spec.value_dim,
                spec.scale,
                spec.is_pairwise,
                self._most_fresh(spec),
            ),
            self._linear(name, spec.down),
            query,
            RmsNorm(self._read(spec.kv_norm, spec.latent_dim), spec.latent_eps),
            self._linear(name, spec.kv_up),
            self._linear(name, spec.o),
            rope_table=self._rope_table(spec.rope),
        )

    def _most_fresh(self, spec: LatentAttentionSpec) -> int:
        """Tokens of a prompt beyond which its heads are projected; never where bits may not depend on it."""
        if self._batch_invariant or not projects_prompts(device_name(self._empty(0))):
            return NEVER_FRESH
        return longest_absorbed(spec.latent_dim, spec.plain_dim, spec.rope_dim, spec.value_dim)

    def _dense_mlp(self, name: str, spec: DenseMlpSpec) -> DenseMlp:
        return DenseMlp(self._linear(name, spec.gate_up), self._linear(name, spec.down))

    def _moe(self, name: str, spec: MoeSpec) -> Moe:
        return Moe(
            self._linear(name, spec.router),
            routing_rule(spec.routing, spec.experts.num_experts, self._source, self._empty),
            self._experts(name, spec.experts),
            shared=None if spec.shared is None else self._shared_expert(name, spec.shared),
            scales_input=spec.scales_input,
        )

    def _shared_expert(self, name: str, spec: SharedExpertSpec) -> SharedExpert:
        gate = None if spec.gate is None else self._linear(name, spec.gate)
        return SharedExpert(self._dense_mlp(name, spec.mlp), gate)

    def _experts(self, name: str, spec: ExpertsSpec) -> Experts:
        row_order = row_order_name(spec)
        return Experts(
            self._laid_out(spec.gate_up, row_order),
            self._laid_out(spec.down, None),
            ExpertSites(self._site_indices[f"{name}.gate_up"], self._site_indices[f"{name}.down"]),
            row_order,
            spec.activation,
            batch_invariant=self._batch_invariant,
        )

    def _laid_out(self, linear: ExpertLinearSpec, row_order: RowOrder | None) -> ExpertLinear:
        return laid_out(next(self._stored_experts), linear, self._source, self._dtype, row_order)

    def _read_experts(self) -> Iterator[StoredExperts]:
        """All layers' projections in order, each asked for before the one before it is given out.

        So that one is read while another is laid out; at most a layer's are held as stored.
        """
        asked: deque[StoredExperts] = deque()
        for experts in (layer.experts for layer in self._spec.layers if layer.experts is not None):
            for linear in (experts.gate_up, experts.down):
                asked.append(read_expert_linear(experts, linear, self._source, self._empty))
                if len(asked) > 1:
                    yield asked.popleft()  # and keeps no reference: what was laid out is to be freed
        while asked:
            yield asked.popleft()

    def _linear(self, name: str, spec: LinearSpec) -> Linear:
        modules = [module for site in spec.sites for module in site.modules]
        num_rows = sum(m.out_features for m in modules)
        bias = self._empty(num_rows) if spec.has_bias else None
        weight = None if spec.fp8 is not None else self._empty(num_rows, spec.in_features)
        begin = 0
        for module in modules:
            end = begin + module.out_features
            if weight is not None:
                self._source.read_into(weight[begin:end], f"{module.path}.weight")
            if bias is not None:
                self._source.read_into(bias[begin:end], f"{module.path}.bias")
            begin = end
        held = self._fp8_weight(modules, spec) if weight is None else weight
        return Linear(held, bias, self._sites(name, spec.sites), batch_invariant=self._batch_invariant)

    def _fp8_weight(self, modules: list[Module], spec: LinearSpec) -> Fp8Weight | torch.Tensor:
        assert spec.fp8 is not None
        shape = Fp8Shape(None, tuple(module.out_features for module in modules), spec.in_features)
        reader = Fp8Reader(spec.fp8, shape, self._source, self._empty)
        read_modules(reader, [module.path for module in modules])
        return reader.weight()

    def _sites(self, name: str, sites: tuple[SiteSpec, ...]) -> LinearSites:
        return LinearSites(
            tuple(self._site_indices[f"{name}.{site.key}"] for site in sites),
            tuple(site.out_features for site in sites),
            tuple(len(site.modules) for site in sites),
        )

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._read(name, self._spec.hidden_size), self._spec.norm_eps)

    def _rope_table(self, parameters: RopeParameters) -> torch.Tensor:
        if parameters not in self._rope_tables:
            self._rope_tables[parameters] = rope_table(parameters, self._num_positions, self._device)
        return self._rope_tables[parameters]

    def _read(self, name: str, *shape: int) -> torch.Tensor:
        parameter = self._empty(*shape)
        self._source.read_into(parameter, name)
        return parameter

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        except RuntimeError as error:  # also when CUDA is out of memory
            raise ModelConfigError(
                f"config.json makes a parameter {list(shape)}, for which {self._device} has no memory: "
                f"{str(error).splitlines()[0]}"
            ) from error
