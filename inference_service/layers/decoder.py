"""A decoder of pre-norm layers: embedding, layers, final norm, output head."""

from collections.abc import Sequence

import torch

from inference_service.layers.attention import Attention
from inference_service.layers.batch import ForwardBatch, LoraBatch
from inference_service.layers.dense_mlp import DenseMlp
from inference_service.layers.embedding import Embedding
from inference_service.layers.latent_attention import LatentAttention
from inference_service.layers.linear import Linear
from inference_service.layers.moe import Moe
from inference_service.layers.norm import RmsNorm
from inference_service.layers.projected import Projected


class DecoderLayer:
    """Norm, attention, norm, MLP, with the residual carried beside."""

    def __init__(
        self,
        input_norm: RmsNorm,
        attention: Attention | LatentAttention,
        mlp_norm: RmsNorm,
        mlp: DenseMlp | Moe,
    ) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def feed_forward(self, x: torch.Tensor, batch: ForwardBatch) -> Projected:
        """The MLP, [T, H] to [T, H]; a router sees to it that rows of no request touch no further expert."""
        if isinstance(self.mlp, DenseMlp):
            return self.mlp(x, batch.lora)
        return self.mlp(x, batch.lora, batch.source_rows)


class Decoder:
    """The whole model. Holds weights only; the cache and the batch are passed in.

    The factors multiply the embedding, what each half of a layer adds to the residual, and the logits.
    """

    def __init__(
        self,
        embed: Embedding,
        layers: Sequence[DecoderLayer],
        final_norm: RmsNorm,
        lm_head: Linear,
        *,
        embedding_factor: float = 1.0,
        residual_factor: float = 1.0,
        logits_factor: float = 1.0,
    ) -> None:
        self.embed = embed
        self.layers = tuple(layers)
        self.final_norm = final_norm
        self.lm_head = lm_head
        self.embedding_factor = embedding_factor
        self.residual_factor = residual_factor
        self.logits_factor = logits_factor

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the final hidden states [T, H]; the batch's keys and values are in the cache afterwards."""
        lora = batch.lora
        residual = _scaled(self.embed(batch.token_ids, lora), self.embedding_factor)
        x: Projected | None = None
        for layer, cache in zip(self.layers, batch.cache, strict=True):
            # The first layer's input is the residual itself; later ones add the layer before in the norm.
            h = layer.input_norm(residual) if x is None else layer.input_norm.after(x, residual)
            attended = self._to_add(layer.attention(h, batch, cache))
            h = layer.mlp_norm.after(attended, residual)
            x = self._to_add(layer.feed_forward(h, batch))
        return self.final_norm(residual) if x is None else self.final_norm.after(x, residual)

    def logits(self, hidden: torch.Tensor, lora: LoraBatch) -> torch.Tensor:
        """Logits [N, V] of `hidden` [N, H], rows picked from `forward`; `lora` describes those rows."""
        return _scaled(self.lm_head(hidden, lora), self.logits_factor)

    def _to_add(self, half: Projected) -> Projected:
        """What a half of a layer adds to the residual."""
        return half if self.residual_factor == 1.0 else Projected(half.whole().mul_(self.residual_factor))


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1.0 else x.mul_(factor)
