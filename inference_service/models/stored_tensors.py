"""Which tensors a checkpoint of a declared model holds: for benches and tests that write some."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from inference_service.models.build import ModelBuilder
from inference_service.models.lora_sites import lora_schema, site_indices
from inference_service.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A stored tensor: packed bytes, e4m3, or floats of any width."""

    shape: tuple[int, ...]
    is_packed: bool
    is_e4m3: bool = False


def stored_tensors(spec: ModelSpec) -> dict[str, TensorShape]:
    """Every tensor by its name in the checkpoint, in the order in which a load reads them."""
    source = _Names(spec.weight_prefix)
    builder = ModelBuilder(
        spec,
        source,
        site_indices(lora_schema(spec, lambda _name: ("", ""))),
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        num_positions=1,
        batch_invariant=False,
    )
    builder.build()
    return source.tensors


@dataclass(slots=True)
class _Names:
    """A WeightSource that takes down what it is asked for."""

    prefix: str
    tensors: dict[str, TensorShape] = field(default_factory=dict[str, TensorShape])

    def read_into(self, destination: torch.Tensor, name: str, *, transpose: bool = False) -> None:
        stored = destination.transpose(-1, -2) if transpose else destination
        self.tensors[self.prefix + name] = TensorShape(
            tuple(stored.shape), destination.dtype == torch.uint8, destination.dtype == torch.float8_e4m3fn
        )

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        del name

    def wait(self, *names: str) -> None:
        pass

    def finish(self, ignored: Sequence[str] = ()) -> None:
        pass
