"""The base model's LoRA schema: every place that takes LoRA, with its shapes and the names PEFT gives it.

The node derives it from the model family's declaration; the adapter manager checks uploads against it.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class SiteKind(StrEnum):
    """How a site's A and B are shaped and applied.

    LINEAR: A [R, in], B [out, R], y += s B (A x).
    EXPERTS: A [E, num_a*R, in], B [E, out, R]; num_a is 2 where the two slices have their own A.
    EMBEDDING: A [vocabulary, R] (a row a token: PEFT's file transposed), B [hidden, R], y += s B A[token].
    """

    LINEAR = "linear"
    EXPERTS = "experts"
    EMBEDDING = "embedding"


class ParameterLayout(StrEnum):
    """How the base parameter stores one expert's matrix."""

    OUT_IN = "out_in"
    IN_OUT = "in_out"


class RowOrder(StrEnum):
    """Order of the output rows of a site with two slices."""

    CONCATENATED = "concatenated"
    INTERLEAVED = "interleaved"


@dataclass(frozen=True, slots=True)
class SiteSlice:
    """A part of a site's output rows that a checkpoint may name by itself, such as gate and up.

    `modules` are the dotted module paths a PEFT file may use, "{expert}" standing for the expert's index,
    without PEFT's "base_model.model." prefix.
    """

    name: str
    out_features: int
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoraSite:
    """One place that takes LoRA. `layer` is None outside the layers (embed, lm_head)."""

    key: str
    layer: int | None
    kind: SiteKind
    in_features: int
    out_features: int
    slices: tuple[SiteSlice, ...]
    num_experts: int = 0
    row_order: RowOrder = RowOrder.CONCATENATED
    fused_parameter: str = ""
    parameter_layout: ParameterLayout = ParameterLayout.OUT_IN
    base_weight_dtype: str = ""
    base_weight_sha256: str = ""

    @property
    def name(self) -> str:
        """The site's unique name, e.g. "layers.3.gate_up" or "lm_head"."""
        return self.key if self.layer is None else f"layers.{self.layer}.{self.key}"


@dataclass(frozen=True, slots=True)
class LoraSchema:
    """All sites, layers ascending, sites outside the layers last; the order is the tables' site index."""

    num_layers: int
    sites: tuple[LoraSite, ...]

    def to_json(self) -> bytes:
        """Canonical JSON: sorted keys, no white space."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        """Sha256 of the canonical JSON, lower-case hex."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @staticmethod
    def from_json(data: bytes) -> "LoraSchema":
        """Inverse of `to_json`; raises KeyError, TypeError or ValueError on anything else."""
        raw: dict[str, Any] = json.loads(data)
        return LoraSchema(num_layers=raw["num_layers"], sites=tuple(_site(s) for s in raw["sites"]))


def _site(raw: dict[str, Any]) -> LoraSite:
    slices = tuple(SiteSlice(s["name"], s["out_features"], tuple(s["modules"])) for s in raw.pop("slices"))
    return LoraSite(
        slices=slices,
        kind=SiteKind(raw.pop("kind")),
        row_order=RowOrder(raw.pop("row_order")),
        parameter_layout=ParameterLayout(raw.pop("parameter_layout")),
        **raw,
    )
