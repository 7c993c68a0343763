"""How a checkpoint stores matrices in e4m3, by its quantization_config, and which of a model's it means.

Three methods write the same tensors, "<module>.weight" in F8_E4M3 with its scales beside it: "fp8" (as
DeepSeek-V3 and Qwen3 are released, and as vLLM writes it), "compressed-tensors", "fbgemm_fp8".
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from inference_service.models.attention_spec import AnyAttentionSpec, AttentionSpec
from inference_service.models.config import ConfigReader
from inference_service.models.errors import ModelConfigError
from inference_service.models.linear_spec import Fp8Format, LinearSpec, Module
from inference_service.models.spec import (
    DenseMlpSpec,
    ExpertLinearSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    PerExpertWeights,
)
from lorikeet_kernels.dense.quantize_rows import GROUP

METHODS = ("fp8", "compressed-tensors", "fbgemm_fp8")
AT_LOAD = Fp8Format("channel", "token", is_stored=False)
"""16-bit weights that are quantised while they are read."""
_BLOCK = (GROUP, GROUP)


@dataclass(frozen=True, slots=True)
class Unconverted:
    """Modules that a checkpoint leaves as they were: whole names, their beginnings or ends, and patterns."""

    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...] = ()

    def has(self, path: str) -> bool:
        """Whether the module at `path` is one."""
        parts = path.split(".")
        pieces = (*(".".join(parts[:n]) for n in range(1, len(parts) + 1)), *_ends(parts))
        return any(piece in self.names for piece in pieces) or any(p.match(path) for p in self.patterns)


def _ends(parts: list[str]) -> Iterator[str]:
    return (".".join(parts[n:]) for n in range(1, len(parts)))


def quantized_spec(spec: ModelSpec, quantization: ConfigReader) -> ModelSpec:
    """The same model with its projections in FP8, as the config's section says.

    Embedding, head, routers and a shared expert's gate never are.

    Raises:
        ModelConfigError: what the section asks for is not supported; the message names field and value.
    """
    stored, unconverted = _READERS[quantization.text("quant_method")](quantization)
    return _Rewriter(stored, unconverted, spec.weight_prefix, quantization.where).model(spec)


def quantized_at_load(spec: ModelSpec) -> ModelSpec:
    """The same model, read in 16 or 32 bits and held in FP8."""
    return _Rewriter(AT_LOAD, Unconverted(frozenset()), spec.weight_prefix, "").model(spec)


@dataclass(frozen=True, slots=True)
class _Rewriter:
    stored: Fp8Format
    unconverted: Unconverted
    prefix: str
    where: str

    def model(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, layers=tuple(self._layer(layer) for layer in spec.layers))

    def _layer(self, spec: LayerSpec) -> LayerSpec:
        mlp = self._dense(spec.mlp) if isinstance(spec.mlp, DenseMlpSpec) else self._moe(spec.mlp)
        return replace(spec, attention=self._attention(spec.attention), mlp=mlp)

    def _attention(self, spec: AnyAttentionSpec) -> AnyAttentionSpec:
        if isinstance(spec, AttentionSpec):
            return replace(spec, qkv=self._linear(spec.qkv), o=self._linear(spec.o))
        kv_up = self._linear(spec.kv_up)
        if kv_up.fp8 is not None:
            # A latent is projected up by parts of this matrix, which no kernel takes quantised.
            kv_up = replace(
                kv_up, fp8=replace(kv_up.fp8, is_dequantized=True) if kv_up.fp8.is_stored else None
            )
        return replace(
            spec,
            down=self._linear(spec.down),
            q_up=None if spec.q_up is None else self._linear(spec.q_up),
            kv_up=kv_up,
            o=self._linear(spec.o),
        )

    def _dense(self, spec: DenseMlpSpec) -> DenseMlpSpec:
        return replace(spec, gate_up=self._linear(spec.gate_up), down=self._linear(spec.down))

    def _moe(self, spec: MoeSpec) -> MoeSpec:
        shared = spec.shared
        if shared is not None:
            shared = replace(shared, mlp=self._dense(shared.mlp))
        return replace(spec, experts=self._experts(spec.experts), shared=shared)

    def _experts(self, spec: ExpertsSpec) -> ExpertsSpec:
        def quantized(linear: ExpertLinearSpec) -> ExpertLinearSpec:
            paths = [
                module.path.format(expert=expert)
                for module in linear.site.modules
                for expert in range(spec.num_experts if isinstance(linear.storage, PerExpertWeights) else 1)
            ]
            return replace(linear, fp8=self._format(paths))

        return replace(spec, gate_up=quantized(spec.gate_up), down=quantized(spec.down))

    def _linear(self, spec: LinearSpec) -> LinearSpec:
        return replace(spec, fp8=self._format([module.path for module in _modules(spec)]))

    def _format(self, paths: list[str]) -> Fp8Format | None:
        """Of modules whose rows are one matrix."""
        kept = [path for path in paths if self._is_unconverted(path)]
        if not kept:
            return self.stored
        if len(kept) < len(paths):
            other = next(path for path in paths if path not in kept)
            raise ModelConfigError(
                f"{self.where}: {kept[0]} is not converted and {other} is; modules whose rows are one "
                "projection must be in FP8 together or not at all"
            )
        return None

    def _is_unconverted(self, path: str) -> bool:
        return self.unconverted.has(path) or (
            bool(self.prefix) and self.unconverted.has(f"{self.prefix}{path}")
        )


def _modules(spec: LinearSpec) -> Iterator[Module]:
    return (module for site in spec.sites for module in site.modules)


def _read_fp8(config: ConfigReader) -> tuple[Fp8Format, Unconverted]:
    config.require("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    config.require("activation_scheme", ("dynamic", "static"), "dynamic")
    is_static = config.text("activation_scheme", "dynamic") == "static"
    names = config.texts("modules_to_not_convert", ()) or config.texts("ignored_layers", ())
    if config.fields.get("weight_block_size") is None:
        return Fp8Format("tensor", "static" if is_static else "token"), Unconverted(frozenset(names))
    if config.integers("weight_block_size") != _BLOCK:
        raise config.fail("weight_block_size", f"[{GROUP}, {GROUP}]")
    if is_static:
        raise config.fail("activation_scheme", "'dynamic', as weights with scales for blocks take it")
    return Fp8Format("block", "group", scale_suffix="weight_scale_inv"), Unconverted(frozenset(names))


def _read_fbgemm(config: ConfigReader) -> tuple[Fp8Format, Unconverted]:
    names = config.texts("modules_to_not_convert", ())
    bound = config.optional_number("activation_scale_ub")
    return Fp8Format("channel", "token", bound=bound), Unconverted(frozenset(names))


def _read_compressed(config: ConfigReader) -> tuple[Fp8Format, Unconverted]:
    config.require("format", ("float-quantized", "naive-quantized"), "float-quantized")
    if (cache := config.section("kv_cache_scheme")) is not None:
        # Whether the cache is in FP8 is a setting of this server; the scales are used then.
        cache.require("num_bits", (8,), 8)
        cache.require("type", ("float",), "float")
        cache.require("dynamic", (False,), default=False)
    config.require("sparsity_config", (None, {}), None)
    groups = config.section("config_groups")
    if groups is None or len(groups.fields) != 1:
        raise config.fail("config_groups", "one group")
    group = groups.section(next(iter(groups.fields)))
    weights = None if group is None else group.section("weights")
    if group is None or weights is None:
        raise config.fail("config_groups", "a group with weights")
    group.require("targets", (["Linear"],), ["Linear"])
    _require_e4m3(weights)
    weights.require("strategy", ("block", "channel", "tensor"), "tensor")
    weights.require("dynamic", (False,), default=False)
    inputs = group.section("input_activations")
    if inputs is None:
        raise group.fail("input_activations", "an object: weights alone in FP8 are not supported")
    _require_e4m3(inputs)
    strategy = weights.text("strategy", "tensor")
    is_dynamic = inputs.boolean("dynamic", default=False)
    ignored = config.texts("ignore", ())
    names = frozenset(name for name in ignored if not name.startswith("re:"))
    patterns = tuple(_pattern(config, name) for name in ignored if name.startswith("re:"))
    unconverted = Unconverted(names, patterns)
    if strategy == "block":
        if weights.integers("block_structure", _BLOCK) != _BLOCK:
            raise weights.fail("block_structure", f"[{GROUP}, {GROUP}]")
        inputs.require("strategy", ("group",), "group")
        inputs.require("group_size", (GROUP,), GROUP)
        inputs.require("dynamic", (True,), default=False)
        return Fp8Format("block", "group"), unconverted
    inputs.require("strategy", ("token", "tensor") if is_dynamic else ("tensor",), "tensor")
    stored = "channel" if strategy == "channel" else "tensor"
    return Fp8Format(stored, "token" if is_dynamic else "static"), unconverted


def _require_e4m3(config: ConfigReader) -> None:
    config.require("num_bits", (8,), 8)
    config.require("type", ("float",), "int")
    config.require("symmetric", (True,), default=True)


def _pattern(config: ConfigReader, name: str) -> re.Pattern[str]:
    try:
        return re.compile(name.removeprefix("re:"))
    except re.error as error:
        raise ModelConfigError(
            f"{config.where}: ignore has {name!r}, no regular expression: {error}"
        ) from None


_READERS = {"fp8": _read_fp8, "compressed-tensors": _read_compressed, "fbgemm_fp8": _read_fbgemm}
