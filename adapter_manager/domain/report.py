"""What an upload's files were found to hold."""

from dataclasses import dataclass
from enum import StrEnum


class ReportedRole(StrEnum):
    """A tensor's part in its pair, as its name in the file says."""

    LORA_A = "lora_A"
    LORA_B = "lora_B"
    BASE_WEIGHT = "base_weight"


@dataclass(frozen=True, slots=True)
class MatchedSite:
    """One site of the base model and what the upload holds for it; `bytes` are those of its payload."""

    site: str
    layer: int | None
    rank: int
    scales: tuple[float, ...]
    layout: str
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of the files that were read alike, and whose names differ in numbers alone.

    `key` has "*" for each number, `indices` the numbers as ranges for each "*": the group holds a tensor for
    every combination. `shape` is of each, `bytes` of all, in the files. Without a `site` they are not used;
    `neutral` says why they, or all of their pair, change nothing.
    """

    key: str
    indices: tuple[str, ...]
    count: int
    role: ReportedRole
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    site: str = ""
    slice: str = ""
    layout: str = ""
    rank: int = 0
    scale: float = 0.0
    scaling: str = ""
    neutral: str = ""


@dataclass(frozen=True, slots=True)
class SiteCoverage:
    """What the upload holds for one kind of site over all layers; layers as ranges, such as "0-3,5".

    `slices` are those with weights where others have none, else empty. `min_experts` and `max_experts` are
    how many of `num_experts` have weights in a layer. `bytes` are those of the payload.
    """

    site: str
    layers: str
    layers_without: str
    tensors: int = 0
    ranks: tuple[int, ...] = ()
    scales: tuple[float, ...] = ()
    layouts: tuple[str, ...] = ()
    slices: tuple[str, ...] = ()
    min_experts: int = 0
    max_experts: int = 0
    num_experts: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class UploadReport:
    """Every tensor of the upload is either used or neutral: used + neutral = total.

    `tensors` name all of them but the last `tensors_not_listed`, so that a report stays small. `coverage` has
    every kind of site that the base model has. `file_bytes` are those of all tensors as they came.
    """

    tensors_total: int
    tensors_used: int
    tensors_neutral: int
    sites: tuple[MatchedSite, ...]
    warnings: tuple[str, ...]
    tensors: tuple[TensorGroup, ...] = ()
    tensors_not_listed: int = 0
    coverage: tuple[SiteCoverage, ...] = ()
    file_bytes: int = 0
