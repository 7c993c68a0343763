"""Uploads: staged as bytes, checked against the base model, rewritten into one canonical payload."""

from adapter_manager.application.ingest.adapter_files import AdapterFiles
from adapter_manager.application.ingest.adapter_ingest import ingest_adapter, ingest_directory
from adapter_manager.application.ingest.limits import IngestLimits, IngestTarget
from adapter_manager.application.ingest.upload_files import UploadFile
from adapter_manager.application.ingest.upload_session import UploadSession
from adapter_manager.application.ingest.upload_staging import UploadStaging

__all__ = [
    "AdapterFiles",
    "IngestLimits",
    "IngestTarget",
    "UploadFile",
    "UploadSession",
    "UploadStaging",
    "ingest_adapter",
    "ingest_directory",
]
