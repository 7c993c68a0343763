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
from lorikeet_kernels.lora.few_heads_lora import joined_heads
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
        self.head_weights = kv_up.weight.view(shape.num_heads, rows, shape.latent_dim)
        self._key_up = self.head_weights[:, : shape.plain_dim]  # [H, plain, latent]
        self._value_up = self.head_weights[:, shape.plain_dim :].transpose(1, 2)  # [H, latent, value]
        self._key_rows = HeadRows(rows, 0, shape.plain_dim)
        self._value_rows = HeadRows(rows, shape.plain_dim, shape.value_dim)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, cache: LayerCache) -> Projected:
        """Attend over `cache`, to which the batch's latents are added first. [T, H] to [T, H]."""
        shape, num_tokens = self.shape, x.shape[0]
        down = self.down.beside(x, batch.lora)
        query, rows = self._queries(down), self._latents(down.y)
        if self.query is not None:
            query = self.query.up.beside(self.query.norm.of(query), batch.lora)
        latent, shared = rows.split((shape.latent_dim, shape.rope_dim), dim=1)
        q = query.y.view(num_tokens, shape.num_heads, -1)
        absorbed = q.new_empty(num_tokens, shape.num_heads, shape.latent_dim + shape.rope_dim)
        latent = latent_inputs(
            q,
            latent,
            shared,
            absorbed,
            cache.keys,
            batch.attention.slot_mapping,
            batch.positions,
            self.rope_table,
            self.kv_norm.weight,
            self.kv_norm.eps,
            interleaved=shape.is_pairwise,
            query_delta=None if query.delta is None else query.delta.view_as(q),
            delta=None if down.delta is None else self._latents(down.delta),
            delta_is_joined=query.is_joined,
        )
        self._project(
            q[..., : shape.plain_dim], self._key_up, absorbed[..., : shape.latent_dim], self._key_rows,
            batch.lora, down=True,
        )  # fmt: skip
        # Some rows may be prompts', which only a batch of more rows than such a prompt has.
        has_prompts = num_tokens > max(shape.most_fresh, batch.attention.sequence_lens.shape[0])
        sums = q.new_empty(num_tokens, shape.num_heads, shape.latent_dim)
        latent_attention(
            absorbed, cache.keys, batch.attention, shape.scale, sums, most_fresh=shape.most_fresh
        )
        out = q.new_empty(num_tokens, shape.num_heads, shape.value_dim)
        self._project(sums, self._value_up, out, self._value_rows, batch.lora, down=False)
        if has_prompts:
            up = self.kv_up(latent, batch.lora).view(num_tokens, shape.num_heads, -1)
            prompt_attention(q, up, shared, batch.attention, shape.scale, out, most_fresh=shape.most_fresh)
        return self.o.beside(out.flatten(1), batch.lora)

    def _queries(self, down: Projected) -> Projected:
        """The columns that begin down's rows: the queries, or their latent."""
        count = down.y.shape[1] - self.shape.latent_dim - self.shape.rope_dim
        delta = None if down.delta is None else down.delta[:, :count]
        return Projected(down.y[:, :count], delta, down.is_joined)

    def _latents(self, rows: torch.Tensor) -> torch.Tensor:
        """The columns that end them: keys' latent and the shared rotated key."""
        return rows[:, rows.shape[1] - self.shape.latent_dim - self.shape.rope_dim :]

    def _project(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        rows: HeadRows,
        lora: LoraBatch,
        *,
        down: bool,
    ) -> None:
        """`out` becomes x by each head's own weight: queries absorbed with `down`, else sums' values."""
        is_invariant, site = self.kv_up.batch_invariant, self.kv_up.sites.indices[0]
        if not lora.is_active:
            head_linear(x, weight, out, batch_invariant=is_invariant)
        elif is_invariant or not joined_heads(
            x, weight, out, lora.segments, lora.tables, site, rows, down=down
        ):
            head_linear(x, weight, out, batch_invariant=is_invariant)
            head_lora(out, x, lora.segments, lora.tables, site, rows, down=down)
