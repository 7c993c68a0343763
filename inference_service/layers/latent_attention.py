"""Multi-head latent attention with absorbed weights: what is cached is the latent, shared by all heads.

The up-projection's key rows are applied to the queries and its value rows to attention's sums, and so are an
adapter's: a request's latents all belong to its own adapter, so nothing is lost.
"""

from dataclasses import dataclass

import torch

from inference_service.layers.batch import ForwardBatch, LayerCache, LoraBatch
from inference_service.layers.linear import Linear
from inference_service.layers.norm import RmsNorm
from inference_service.layers.projected import Projected
from lorikeet_kernels.attention.latent_attention import latent_attention
from lorikeet_kernels.attention.latent_inputs import latent_inputs
from lorikeet_kernels.attention.prompt_attention import prompt_attention
from lorikeet_kernels.dense.head_linear import head_linear
from lorikeet_kernels.lora.head_lora import HeadRows, head_lora


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of one layer. A key has `plain_dim` elements of the head's own and `rope_dim` rotated ones.

    Prompts of more than `most_fresh` tokens that are whole in a batch are attended without absorbing.
    """

    num_heads: int
    latent_dim: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    is_pairwise: bool
    most_fresh: int


@dataclass(frozen=True, slots=True)
class LatentQuery:
    """The norm of the queries' latent and the projection up from it."""

    norm: RmsNorm
    up: Linear


class LatentAttention:
    """`down` makes [queries or their latent | keys' latent | shared rotated key]."""

    def __init__(
        self,
        shape: LatentShape,
        down: Linear,
        query: LatentQuery | None,
        kv_norm: RmsNorm,
        kv_up: Linear,
        o: Linear,
        *,
        rope_table: torch.Tensor,
    ) -> None:
        self.shape = shape
        self.down = down
        self.query = query
        self.kv_norm = kv_norm
        self.kv_up = kv_up
        self.o = o
        self.rope_table = rope_table
        # Views of kv_up's rows, laid out as the products read them: no second copy of the weight.
        assert isinstance(kv_up.weight, torch.Tensor)  # also of an FP8 checkpoint, which is dequantised
        rows = shape.plain_dim + shape.value_dim
        heads = kv_up.weight.view(shape.num_heads, rows, shape.latent_dim)
        self._key_up = heads[:, : shape.plain_dim]  # [H, plain, latent]
        self._value_up = heads[:, shape.plain_dim :].transpose(1, 2)  # [H, latent, value]
        self._key_rows = HeadRows(rows, 0, shape.plain_dim)
        self._value_rows = HeadRows(rows, shape.plain_dim, shape.value_dim)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, cache: LayerCache) -> Projected:
        """Attend over `cache`, to which the batch's latents are added first. [T, H] to [T, H]."""
        shape, num_tokens = self.shape, x.shape[0]
        down = self.down(x, batch.lora)
        num_query = down.shape[1] - shape.latent_dim - shape.rope_dim
        query, latent, shared = down.split((num_query, shape.latent_dim, shape.rope_dim), dim=1)
        if self.query is not None:
            query = self.query.up(self.query.norm(query), batch.lora)
        q = query.view(num_tokens, shape.num_heads, -1)
        absorbed = q.new_empty(num_tokens, shape.num_heads, shape.latent_dim + shape.rope_dim)
        latent = latent_inputs(
            q, latent, shared, absorbed, cache.keys, batch.attention.slot_mapping, batch.positions,
            self.rope_table, self.kv_norm.weight, self.kv_norm.eps, interleaved=shape.is_pairwise,
        )  # fmt: skip
        self._absorb(q[..., : shape.plain_dim], absorbed[..., : shape.latent_dim], batch.lora)
        # Some rows may be prompts', which only a batch of more rows than such a prompt has.
        has_prompts = num_tokens > max(shape.most_fresh, batch.attention.sequence_lens.shape[0])
        sums = q.new_empty(num_tokens, shape.num_heads, shape.latent_dim)
        latent_attention(
            absorbed, cache.keys, batch.attention, shape.scale, sums, most_fresh=shape.most_fresh
        )
        out = q.new_empty(num_tokens, shape.num_heads, shape.value_dim)
        self._project(sums, out, batch.lora)
        if has_prompts:
            up = self.kv_up(latent, batch.lora).view(num_tokens, shape.num_heads, -1)
            prompt_attention(q, up, shared, batch.attention, shape.scale, out, most_fresh=shape.most_fresh)
        return self.o.beside(out.flatten(1), batch.lora)

    def _absorb(self, plain: torch.Tensor, absorbed: torch.Tensor, lora: LoraBatch) -> None:
        """Queries [T, H, plain] into the latents' space, [T, H, latent]."""
        head_linear(plain, self._key_up, absorbed, batch_invariant=self.kv_up.batch_invariant)
        if lora.is_active:
            site = self.kv_up.sites.indices[0]
            head_lora(absorbed, plain, lora.segments, lora.tables, site, self._key_rows, down=True)

    def _project(self, sums: torch.Tensor, out: torch.Tensor, lora: LoraBatch) -> None:
        """Sums of latents [T, H, latent] to each head's values, [T, H, value]."""
        head_linear(sums, self._value_up, out, batch_invariant=self.kv_up.batch_invariant)
        if lora.is_active:
            site = self.kv_up.sites.indices[0]
            head_lora(out, sums, lora.segments, lora.tables, site, self._value_rows, down=False)
