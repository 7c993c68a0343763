"""What an upload's files were found to hold."""

from dataclasses import dataclass


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
class UploadReport:
    """Every tensor of the upload is either used or neutral: used + neutral = total."""

    tensors_total: int
    tensors_used: int
    tensors_neutral: int
    sites: tuple[MatchedSite, ...]
    warnings: tuple[str, ...]
