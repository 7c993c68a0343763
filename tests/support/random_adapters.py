"""Adapters with random weights at every site, on a backend's device without either service running."""

from pathlib import Path

from inference_service.execution.backend import DeviceBackend
from lorikeet_contract.manifest import PayloadDtype
from lorikeet_contract.schema import LoraSchema
from tests.support.payloads import random_site, write_payload


def activate_random(backend: DeviceBackend, path: Path, slot: int, rank: int, *, seed: int = 0) -> None:
    """Write one to `path`, read it, bring it into a slot."""
    schema = LoraSchema.from_json(backend.info.lora_schema)
    sites = [
        random_site(site, rank, scales=(0.3,), seed=1000 * seed + 100 * slot + index)
        for index, site in enumerate(schema.sites)
    ]
    manifest = write_payload(path, schema, backend.info.base_digest, sites, PayloadDtype.FLOAT32)
    backend.host_pool.read(manifest, str(path))
    assert backend.arena.begin_copy(manifest.digest, slot)
    while slot not in backend.arena.poll():
        pass
