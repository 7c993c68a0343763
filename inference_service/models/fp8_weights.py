"""FP8 matrices out of a checkpoint: values and scales of modules that make up one matrix. For `build.py`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from inference_service.models.checkpoint import WeightSource
from inference_service.models.errors import CheckpointError
from inference_service.models.linear_spec import Fp8Format
from lorikeet_kernels.dense.fp8_weight import Fp8Weight, dequantize_fp8, quantize_channels, row_blocks
from lorikeet_kernels.dense.quantize_rows import E4M3, GROUP, ActivationScaling

Allocate = Callable[..., torch.Tensor]
"""A parameter of the given shape, on the device, in the compute dtype unless `dtype` is given."""


@dataclass(frozen=True, slots=True)
class Fp8Shape:
    """E matrices (None: one, without that dimension), each of modules of these heights.

    Modules lie one below the other, or row by row in turn where `is_interleaved`.
    """

    num_experts: int | None
    heights: tuple[int, ...]
    in_features: int
    is_interleaved: bool = False


class Fp8Reader:
    """Reads one projection's modules; `weight` is what they make. Scales of modules may differ everywhere."""

    def __init__(self, form: Fp8Format, shape: Fp8Shape, source: WeightSource, allocate: Allocate) -> None:
        self._form = form
        self._shape = shape
        self._source = source
        self._dtype = allocate(0).dtype
        self._names: list[str] = []
        self._is_fused = False
        experts, num_rows = shape.num_experts or 1, sum(shape.heights)
        self._values = allocate(
            experts, num_rows, shape.in_features, dtype=E4M3 if form.is_stored else self._dtype
        )
        self._scales = self._values.new_empty(0, dtype=torch.float32)
        if form.is_stored:
            blocks = (sum(map(_num_blocks, shape.heights)), _num_blocks(shape.in_features))
            of_matrix = blocks if form.weights == "block" else (num_rows,)
            # ones, so that a scale that is not there is reported as missing and not as no number
            self._scales = allocate(experts, *of_matrix, dtype=torch.float32).fill_(1.0)
        of_modules = (experts, len(shape.heights))
        self._given = allocate(*of_modules, dtype=torch.float32).fill_(1.0)
        self._inputs = allocate(*of_modules, dtype=torch.float32).fill_(1.0)
        self._input_names: dict[tuple[int, int], str] = {}

    def read_module(self, path: str, index: int, expert: int = 0) -> None:
        """Begin to read the module at `path`, the `index`-th of the matrix."""
        form, rows = self._form, self._rows(index)
        self._read(self._values[expert, rows], f"{path}.weight")
        if not form.is_stored:
            return
        name = f"{path}.{form.scale_suffix}"
        if form.weights == "block":
            first = sum(map(_num_blocks, self._shape.heights[:index]))
            last = first + _num_blocks(self._shape.heights[index])
            self._read(self._scales[expert, first:last], name)
        elif form.weights == "channel":
            self._read_as_stored(self._scales[expert, rows], name, (-1, 1))
        else:
            self._read_as_stored(self._given[expert, index], name, (1,))
        if form.activations == "static":
            name = self._input_names[expert, index] = f"{path}.input_scale"
            self._read_as_stored(self._inputs[expert, index], name, (1,))

    def read_fused(self, name: str, *, is_transposed: bool) -> None:
        """Begin to read all experts' matrices out of the tensor `name`, and their scales beside it."""
        form, self._is_fused = self._form, True
        self._read(self._values, name, transpose=is_transposed)
        if not form.is_stored:
            return
        scales = f"{name}{form.scale_suffix.removeprefix('weight')}"
        if form.weights == "block":
            self._read(self._scales, scales, transpose=is_transposed)
        elif form.weights == "channel":
            self._read_as_stored(self._scales, scales, (len(self._values), 1, -1))
        else:  # one number for each expert's matrix, which all its modules have
            self._read_as_stored(self._given[:, 0], scales, (-1, 1))

    def weight(self) -> Fp8Weight | torch.Tensor:
        """What was read; waits where scales are to be spread over rows, or values to be made.

        Raises:
            CheckpointError: a static scale of an input is not above 0: dividing by it would leave nothing.
        """
        form, shape = self._form, self._shape
        if (
            form.weights == "tensor"
            or form.activations == "static"
            or not form.is_stored
            or form.is_dequantized
        ):
            self._source.wait(*self._names)
        values, scales = self._values, self._scales
        if not form.is_stored:
            values, scales = _quantized(values)
        elif form.weights == "tensor":
            if self._is_fused:
                self._given[:, 1:] = self._given[:, :1]
            for index in range(len(shape.heights)):
                scales[:, self._rows(index)] = self._given[:, index : index + 1]
        mapped = None
        if form.weights == "block":
            mapped = row_blocks(shape.heights, is_interleaved=shape.is_interleaved)
        if mapped is not None:
            mapped = mapped.to(values.device)
        if shape.num_experts is None:
            values, scales = values[0], scales[0]
        weight = Fp8Weight(values, scales, self._activations(), mapped)
        return dequantize_fp8(weight, self._dtype) if form.is_dequantized else weight

    def _activations(self) -> ActivationScaling:
        form = self._form
        if form.activations != "static":
            return ActivationScaling(form.activations, bound=form.bound)
        # An infinity or a NaN is the source's to name.
        for (expert, index), name in self._input_names.items() if bool((self._inputs <= 0).any()) else ():
            if (scale := float(self._inputs[expert, index])) <= 0:
                raise CheckpointError(f"{name} is {scale:g}; the scale of a projection's input is above 0")
        # One input for all modules and experts: the widest of their ranges, as vLLM takes it.
        return ActivationScaling("static", self._inputs.amax().view(1))

    def _rows(self, index: int) -> slice:
        heights = self._shape.heights
        if self._shape.is_interleaved:
            return slice(index, sum(heights), len(heights))
        first = sum(heights[:index])
        return slice(first, first + heights[index])

    def _read(self, destination: torch.Tensor, name: str, *, transpose: bool = False) -> None:
        self._names.append(name)
        self._source.read_into(destination, name, transpose=transpose)

    def _read_as_stored(self, destination: torch.Tensor, name: str, usual: tuple[int, ...]) -> None:
        """`destination` with dimensions of one where the file has them: tools write [n], [n, 1] or [1, n]."""
        stored = self._source.shape_of(name)
        if stored is None:
            stored = tuple(destination.numel() if size == -1 else size for size in usual)
        view = destination.squeeze()
        for place, size in enumerate(stored):
            if size == 1 and place <= view.dim():
                view = view.unsqueeze(place)
        self._read(view if view.shape == stored else destination, name)


def _num_blocks(size: int) -> int:
    return -(-size // GROUP)


def _quantized(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix at a time, so that little beside the result is held."""
    values = torch.empty(matrices.shape, dtype=E4M3, device=matrices.device)
    scales = torch.empty(matrices.shape[:2], dtype=torch.float32, device=matrices.device)
    for index, matrix in enumerate(matrices):
        values[index], scales[index] = quantize_channels(matrix)
    return values, scales


def read_modules(reader: Fp8Reader, paths: Sequence[str], expert: int = 0) -> None:
    """Begin to read all modules of a matrix."""
    for index, path in enumerate(paths):
        reader.read_module(path, index, expert)
