"""What ingest makes of an upload: a manifest, a payload file and a report of what was matched."""

from dataclasses import dataclass
from pathlib import Path

from adapter_manager.domain.report import UploadReport
from lorikeet_contract.manifest import Manifest


@dataclass(frozen=True, slots=True)
class BuiltRevision:
    """A revision ready to be stored. `payload_path` is a local file of `manifest.payload_bytes` bytes."""

    manifest: Manifest
    payload_path: Path
    report: UploadReport

    @property
    def digest(self) -> str:
        """The revision's identity."""
        return self.manifest.digest
