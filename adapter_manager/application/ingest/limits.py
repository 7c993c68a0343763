"""What one upload may take, and what it is made for."""

from dataclasses import dataclass

from lorikeet_contract.schema import LoraSchema


@dataclass(frozen=True, slots=True)
class IngestLimits:
    """Bounds on one upload, and on all that wait together (`max_staged_bytes`; a tenant has a share).

    `max_pattern_s` bounds the matching of all patterns of one configuration.
    """

    max_files: int = 256
    max_upload_bytes: int = 16 << 30
    max_staged_bytes: int = 64 << 30
    max_payload_bytes: int = 16 << 30
    max_pattern_s: float = 1.0

    @property
    def max_tenant_staged_bytes(self) -> int:
        """What one tenant's unfinished uploads may take: a quarter of all, and at least one upload."""
        return max(self.max_upload_bytes, self.max_staged_bytes // 4)


@dataclass(frozen=True, slots=True)
class IngestTarget:
    """The base model that an adapter is checked against.

    `max_rank` 0: no limit. `compute_dtype`: what the node computes in, so that weights beyond its range are
    refused; "" where that is not known. `model_name` is only compared with what the adapter says of itself.
    """

    schema: LoraSchema
    base_digest: str
    max_rank: int = 0
    compute_dtype: str = ""
    model_name: str = ""
