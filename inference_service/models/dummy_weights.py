"""Random weights in place of a checkpoint, for benches of sizes whose files are not at hand.

A bench is worth what its routing is: with any random weights some experts get far more than others. Here

* a layer adds little to the residual, so that a token's hidden state stays close to its own embedding, which
  is as likely to point one way as any other;
* a router's rows are orthonormal: its logits of such a state are independent and alike, so every set of
  experts is as likely as any other, whatever the rule that chooses by them;
* the head prefers, for each token, the one that is a fixed stride further: greedy output walks through the
  whole vocabulary, and its states are as those of random tokens; a loop over a few would be a few experts.

Values are made on the device in the parameters' dtype; two servers of one model have the same ones.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch

from inference_service.models.linear_spec import Fp8Format, LinearSpec
from inference_service.models.spec import (
    DenseMlpSpec,
    ExpertLinearSpec,
    FusedWeights,
    GroupedSigmoidRouting,
    GroupedSoftmaxRouting,
    LayerSpec,
    ModelSpec,
    Mxfp4Weights,
)
from lorikeet_kernels.dense.quantize_rows import LARGEST

# Root mean square of MXFP4's sixteen values.
_CODE_RMS = 2.926
# Standard deviation of e4m3 values; seven of it reach the largest.
_E4M3_STD = 64.0
# What static scales take as an input's largest value.
_LARGEST_INPUT = 8.0
_PIECE = 1 << 24  # elements made at a time
# What all layers together add to the residual, in standard deviations of the embedding.
_UPDATES = 0.3
_BIAS = 0.02
_NORM_SPREAD = 0.02
# How much likelier than all other tokens together the next one of the walk is, as a logarithm.
_MARGIN = 2.0
_GOLDEN = 0.618


@dataclass(frozen=True, slots=True)
class _Normal:
    std: float
    mean: float = 0.0


@dataclass(frozen=True, slots=True)
class _Orthonormal:
    """Rows of length one, at right angles as far as there are as many directions."""


@dataclass(frozen=True, slots=True)
class _MirroredRows:
    """Rows of length one; those of the second half are the first's with the signs of the final norm."""


@dataclass(frozen=True, slots=True)
class _Signs:
    """Plus and minus `size`."""

    size: float


@dataclass(frozen=True, slots=True)
class _Scales:
    """Bytes that make packed values as large as `std`."""

    std: float


@dataclass(frozen=True, slots=True)
class _Codes:
    """Any bytes."""


@dataclass(frozen=True, slots=True)
class _Head:
    """The embedding's rows times `factor`, each at the place of the token that is to follow."""

    factor: float


@dataclass(frozen=True, slots=True)
class _Same:
    """One number everywhere: scales of FP8."""

    value: float


_Fill = _Same | _Normal | _Orthonormal | _MirroredRows | _Signs | _Scales | _Codes | _Head


class DummyWeights:
    """A WeightSource of seeded random values for one model."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._spec = spec
        self._fills = dict(_fills(spec))
        self._generator = torch.Generator(device)
        self._embedding: torch.Tensor | None = None

    def read_into(self, destination: torch.Tensor, name: str, *, transpose: bool = False) -> None:
        """Fill `destination`; what it is for follows from the name."""
        del transpose
        seed = crc32(name.encode())
        generator = self._generator.manual_seed(seed)
        if destination.dtype == torch.float8_e4m3fn:
            self._e4m3(destination, generator)
            return
        if name == self._spec.embed_weight:
            self._embedding = destination
        match self._fills.get(name) or _Normal(_NORM_SPREAD, 1.0 if "norm" in name else 0.0):
            case _Normal(std, mean):
                destination.normal_(mean, std, generator=generator)
            case _Same(value):
                destination.fill_(value)
            case _Codes():
                destination.random_(0, 256, generator=generator)
            case _Scales(std):
                destination.fill_(127 + round(math.log2(std / _CODE_RMS)))
            case _Signs(size):
                self._signs(destination).mul_(size)
            case _MirroredRows():
                destination.normal_(generator=generator)
                destination.div_(torch.linalg.vector_norm(destination, dim=1, keepdim=True))
                half = len(destination) // 2
                signs = self._signs(destination.new_empty(destination.shape[1]))
                torch.mul(destination[:half], signs, out=destination[half : 2 * half])
            case _Orthonormal():
                destination.copy_(_orthonormal(destination.shape, seed))
            case _Head(factor):
                assert self._embedding is not None, f"{name} is made of the embedding"
                stride = walk_stride(len(destination))
                torch.mul(self._embedding[:-stride], factor, out=destination[stride:])
                torch.mul(self._embedding[-stride:], factor, out=destination[:stride])

    def _e4m3(self, out: torch.Tensor, generator: torch.Generator) -> None:
        """Normal values, a piece at a time; the scales make them as large as they are to be."""
        for row in out.split(max(1, _PIECE // max(1, out.numel() // len(out)))):
            row.copy_(torch.randn(row.shape, generator=generator, device=row.device).mul_(_E4M3_STD))

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Any shape that is asked for."""
        del name

    def _signs(self, out: torch.Tensor) -> torch.Tensor:
        return out.random_(0, 2, generator=self._generator.manual_seed(0)).mul_(2).sub_(1)

    def wait(self, *names: str) -> None:
        """Everything is in place already."""

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """Nothing can be missing."""


def walk_stride(vocab_size: int) -> int:
    """How far apart a token and the one that follows it are; its multiples meet every token."""
    stride = max(1, int(vocab_size * _GOLDEN))
    while math.gcd(stride, vocab_size) != 1:
        stride += 1
    return stride


def _orthonormal(shape: Sequence[int], seed: int) -> torch.Tensor:
    rows, columns = shape
    values = torch.randn(columns, rows, generator=torch.Generator().manual_seed(seed))
    if rows <= columns:
        return torch.linalg.qr(values).Q.T
    return torch.nn.functional.normalize(values.T, dim=1)


def _fills(spec: ModelSpec) -> Iterator[tuple[str, _Fill]]:
    """What each tensor is filled with, by name; norms and sinks are left out."""
    is_tied = spec.lm_head_weight == spec.embed_weight
    wanted = (math.log(spec.vocab_size) + _MARGIN) / spec.multipliers.logits
    # Behind a norm the embedding's size does not matter; a tied one must fit the head.
    size = spec.hidden_size**-0.5 * spec.multipliers.embedding if is_tied else 1.0
    if is_tied:
        # The head is the embedding's: a token's successor is its mirror image, whose successor it is.
        yield spec.embed_weight, _MirroredRows()
        yield spec.final_norm, _Signs(wanted * spec.hidden_size**-0.5)
    else:
        yield spec.embed_weight, _Normal(size / spec.multipliers.embedding)
        yield spec.lm_head_weight, _Head(wanted * spec.multipliers.embedding / spec.hidden_size)
    update = _UPDATES * size / math.sqrt(2 * len(spec.layers)) / spec.multipliers.residual
    for layer in spec.layers:
        yield from _layer_fills(layer, update)


def _layer_fills(layer: LayerSpec, update: float) -> Iterator[tuple[str, _Fill]]:
    yield from _linear_fills(layer.attention.linears, update)
    mlp = layer.mlp
    if isinstance(mlp, DenseMlpSpec):
        yield from _linear_fills(mlp.linears, update)
        return
    for module in (m for site in mlp.router.sites for m in site.modules):
        yield f"{module.path}.weight", _Orthonormal()
        yield f"{module.path}.bias", _Normal(0.0)
    if mlp.shared is not None:
        yield from _linear_fills(mlp.shared.mlp.linears, update)
        yield from _linear_fills(() if mlp.shared.gate is None else (mlp.shared.gate,), 1.0)
    if isinstance(mlp.routing, GroupedSigmoidRouting):
        yield mlp.routing.correction_bias, _Normal(0.0)
    if isinstance(mlp.routing, GroupedSigmoidRouting | GroupedSoftmaxRouting):
        update /= max(1.0, mlp.routing.scale)
    yield from _expert_fills(mlp.experts.gate_up, mlp.experts.num_experts, 1.0)
    yield from _expert_fills(mlp.experts.down, mlp.experts.num_experts, update)


def _linear_fills(linears: Sequence[LinearSpec], last: float) -> Iterator[tuple[str, _Fill]]:
    """Outputs are as large as inputs; the last projection's `last` times as large."""
    for linear in linears:
        gain = last if linear is linears[-1] else 1.0
        for module in (m for site in linear.sites for m in site.modules):
            yield f"{module.path}.weight", _Normal(gain * linear.in_features**-0.5)
            if linear.fp8 is not None:
                yield from _scale_fills(module.path, linear.fp8, gain * linear.in_features**-0.5)
            yield f"{module.path}.bias", _Normal(gain * _BIAS)


def _expert_fills(linear: ExpertLinearSpec, num_experts: int, gain: float) -> Iterator[tuple[str, _Fill]]:
    std = gain * linear.in_features**-0.5
    if linear.bias is not None:
        yield linear.bias, _Normal(gain * _BIAS)
    if linear.fp8 is not None:
        for expert in range(num_experts):
            for module in linear.site.modules:
                yield from _scale_fills(module.path.format(expert=expert), linear.fp8, std)
    match linear.storage:
        case Mxfp4Weights(blocks, scales):
            yield blocks, _Codes()
            yield scales, _Scales(std)
        case FusedWeights(name):
            yield name, _Normal(std)
        case _:
            for expert in range(num_experts):
                for module in linear.site.modules:
                    yield f"{module.path.format(expert=expert)}.weight", _Normal(std)


def _scale_fills(path: str, form: Fp8Format, std: float) -> Iterator[tuple[str, _Fill]]:
    yield f"{path}.{form.scale_suffix}", _Same(std / _E4M3_STD)
    yield f"{path}.input_scale", _Same(_LARGEST_INPUT / LARGEST)
