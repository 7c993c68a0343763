"""What ingest makes of an upload: a manifest, a payload file and a report of what was matched."""

from dataclasses import dataclass
from pathlib import Path

from lorikeet_contract.manifest import Manifest


@dataclass(frozen=True, slots=True)
class MatchedSite:
    """One site of the base model and what the upload holds for it."""

    site: str
    layer: int | None
    rank: int
    scales: tuple[float, ...]
    layout: str
    tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class IngestReport:
    """Every tensor of the upload is either used or neutral: used + neutral = total."""

    tensors_total: int
    tensors_used: int
    tensors_neutral: int
    sites: tuple[MatchedSite, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BuiltRevision:
    """A revision ready to be stored. `payload_path` is a local file of `manifest.payload_bytes` bytes."""

    manifest: Manifest
    payload_path: Path
    report: IngestReport

    @property
    def digest(self) -> str:
        """The revision's identity."""
        return self.manifest.digest
