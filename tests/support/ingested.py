"""Fixture adapters through the adapter manager's ingest into a backend, without either service running."""

from pathlib import Path

from adapter_manager.application.ingest import IngestTarget, ingest_directory
from inference_service.execution.backend import DeviceBackend
from lorikeet_contract.schema import LoraSchema
from tests.support.fixtures import FIXTURES


def activate(backend: DeviceBackend, adapter: str, slot: int, scratch: Path) -> str:
    """Ingest a fixture adapter ("qwen3_moe/attn-r8"), bring it into a slot, return its digest."""
    target = IngestTarget(LoraSchema.from_json(backend.info.lora_schema), backend.info.base_digest)
    payload = scratch / f"{adapter.replace('/', '-')}.payload"
    revision = ingest_directory(FIXTURES / "adapters" / adapter, target, payload)
    digest = revision.manifest.digest
    backend.host_pool.read(revision.manifest, str(revision.payload_path))
    assert backend.arena.begin_copy(digest, slot)
    while slot not in backend.arena.poll():
        pass
    return digest
