"""The upload report of one revision, kept beside its adapter's record because it may be large."""

from dataclasses import dataclass

from adapter_manager.domain.report import UploadReport


@dataclass(frozen=True, slots=True)
class RevisionReport:
    """What the last upload of this content under this name found in its files."""

    tenant: str
    adapter: str
    digest: str
    report: UploadReport
