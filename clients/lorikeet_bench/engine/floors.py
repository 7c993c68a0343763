"""What a step must read and compute, whatever computes it: the floor beside every figure.

A decode step reads each weight that any of its rows needs once, and each row's keys and values; activations
are left out, they are thousandths. A prefill multiplies each of its tokens with the weights it is routed to,
and reads those once: few tokens of many experts wait for the bytes.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from inference_service.models import AnyAttentionSpec, describe_model
from inference_service.models.attention_spec import AttentionSpec
from inference_service.models.linear_spec import LinearSpec
from inference_service.models.parameter_bytes import expert_bytes, linear_bytes
from inference_service.models.spec import ExpertLinearSpec, LayerSpec, ModelSpec, MoeSpec
from lorikeet_bench.load.generated_adapters import AdapterShape
from lorikeet_bench.load.routing import expected_distinct
from lorikeet_bench.load.step_floor import BYTES_PER_S, FLOPS, FP8_FLOPS, DecodeStepBytes


@dataclass(frozen=True, slots=True)
class FloorModel:
    """A model and its adapters, for floors."""

    spec: ModelSpec
    dtype: torch.dtype
    adapters: AdapterShape

    @classmethod
    def read(cls, model_dir: Path, dtype: torch.dtype, adapters: AdapterShape) -> "FloorModel":
        """From a model directory's config.json."""
        return cls(describe_model(model_dir).spec, dtype, adapters)

    def decode(self, rows: int, num_adapters: int, context_tokens: float) -> DecodeStepBytes:
        """A step of `rows` requests, spread evenly over the adapters, each `context_tokens` long by now."""
        size = self.dtype.itemsize
        layers = self.spec.layers
        active = min(rows, num_adapters)
        return DecodeStepBytes(
            dense=sum(linear_bytes(linear, size) for layer in layers for linear in layer.linears),
            experts=sum(self._experts(layer, rows) for layer in layers),
            lm_head=size * self.spec.vocab_size * self.spec.hidden_size,
            adapters=active * sum(self._adapter(layer, rows / active) for layer in layers) if active else 0.0,
            kv_cache=rows * sum(self._kv(layer.attention, context_tokens) for layer in layers),
        )

    def prefill_s(self, tokens: int, prompts: int = 1) -> float:
        """Seconds that so many prompts take together, adapters and the head left out.

        Of each projection its multiplications or its bytes, read once, whichever takes longer.
        """
        size, rows = self.dtype.itemsize, prompts * tokens
        seconds = 0.0
        for layer in self.spec.layers:
            for linear in layer.linears:
                elements = linear.in_features * sum(site.out_features for site in linear.sites)
                least_s = linear_bytes(linear, size) / BYTES_PER_S
                seconds += max(2.0 * rows * elements / _flops(linear), least_s)
            if isinstance(layer.mlp, MoeSpec):
                of, top_k = layer.mlp.experts, layer.mlp.routing.top_k
                touched = expected_distinct(of.num_experts, top_k, rows)
                for linear in (of.gate_up, of.down):
                    elements = top_k * linear.in_features * linear.site.out_features
                    least_s = touched * expert_bytes(linear, size) / BYTES_PER_S
                    seconds += max(2.0 * rows * elements / _flops(linear), least_s)
            if isinstance(layer.attention, AttentionSpec):
                seen = min(tokens, layer.attention.window or tokens, layer.attention.chunk or tokens)
                pairs = prompts * (tokens * seen - seen * seen / 2)
                seconds += 4.0 * pairs * layer.attention.num_heads * layer.attention.head_dim / FLOPS
        return seconds

    def closed_loop_tokens_per_s(
        self, concurrency: int, num_adapters: int, input_tokens: int, output_tokens: int
    ) -> float:
        """Output tokens a second of a closed loop: all prompts, then all answers, at their floors."""
        step_s = self.decode(concurrency, num_adapters, input_tokens + output_tokens / 2).seconds
        total_s = self.prefill_s(input_tokens, concurrency) + output_tokens * step_s
        return concurrency * output_tokens / total_s

    def closed_loop_ttft_s(self, concurrency: int, input_tokens: int) -> float:
        """Mean time to a first token where all prompts come at once: the n-th waits for n of them."""
        return sum(self.prefill_s(input_tokens, count + 1) for count in range(concurrency)) / concurrency

    def _experts(self, layer: LayerSpec, rows: int) -> float:
        if not isinstance(layer.mlp, MoeSpec):
            return 0.0
        of = layer.mlp.experts
        each = sum(expert_bytes(linear, self.dtype.itemsize) for linear in (of.gate_up, of.down))
        return each * expected_distinct(of.num_experts, layer.mlp.routing.top_k, rows)

    def _adapter(self, layer: LayerSpec, rows: float) -> float:
        """One adapter's bytes that `rows` rows of a layer read."""
        elements = 0.0
        for linear in layer.linears:
            for site in linear.sites:
                if self.adapters.covers(site.key):
                    elements += linear.in_features + site.out_features
        if isinstance(layer.mlp, MoeSpec):
            of = layer.mlp.experts
            distinct = expected_distinct(of.num_experts, layer.mlp.routing.top_k, rows)
            for linear in (of.gate_up, of.down):
                if self.adapters.covers(linear.site.key):
                    elements += distinct * (linear.in_features + linear.site.out_features)
        return self.dtype.itemsize * self.adapters.rank * elements

    def _kv(self, attention: AnyAttentionSpec, context_tokens: float) -> float:
        """One row's keys and values in a layer."""
        seen = context_tokens
        if isinstance(attention, AttentionSpec):
            seen = min(seen, attention.window or seen, attention.chunk or seen)
        return seen * attention.cached_elements * self.dtype.itemsize


def _flops(linear: LinearSpec | ExpertLinearSpec) -> float:
    """Of the dtype that its multiplications are in."""
    return FLOPS if linear.fp8 is None else FP8_FLOPS
