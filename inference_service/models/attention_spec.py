"""What a model family declares of its attention."""

from dataclasses import dataclass

from inference_service.layers.rope import RopeParameters
from inference_service.models.linear_spec import LinearSpec


@dataclass(frozen=True, slots=True)
class HeadNormSpec:
    """Names of the head norms' weights [D]."""

    q_weight: str
    k_weight: str


@dataclass(frozen=True, slots=True)
class ProjectionNormSpec:
    """RMS norm over all heads of a projection together; names of weights [Hq * D] and [Hkv * D]."""

    q_weight: str
    k_weight: str


@dataclass(frozen=True, slots=True)
class UnitNormSpec:
    """RMS norm of every query and key head, without a weight."""


@dataclass(frozen=True, slots=True)
class QueryTemperatureSpec:
    """Queries grow by 1 + strength * log(1 + floor((position + 1) / interval))."""

    strength: float
    interval: int


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention over q, k, v as one projection. `scale` multiplies the scores, `sinks` names a weight.

    What happens to queries and keys, in this order: `projection_norm`, `head_norm` (behind the rotation where
    `norms_rotated`), the rotation `rope` of neighbours (0, 1), (2, 3), ... where `is_pairwise`, else of a
    head's halves, and `temperature`. `window`: a query sees that many keys, itself included; `chunk`: those
    of its own chunk of so many positions.
    """

    qkv: LinearSpec
    o: LinearSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeParameters | None
    is_pairwise: bool = False
    projection_norm: ProjectionNormSpec | None = None
    head_norm: HeadNormSpec | UnitNormSpec | None = None
    norms_rotated: bool = False
    temperature: QueryTemperatureSpec | None = None
    window: int | None = None
    chunk: int | None = None
    sinks: str | None = None

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """All projections."""
        return (self.qkv, self.o)

    @property
    def cached_elements(self) -> int:
        """Elements that a token takes in the cache: keys and values."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def attended_elements(self) -> int:
        """Elements a token of attention's queries and results."""
        return 2 * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention: keys and values, maybe queries, go through a narrow latent.

    `down` holds the queries' latent (or the queries where `q_up` is None) and, behind it, the keys' latent
    with `rope_dim` elements of a key that all heads share: what is cached, for all heads at once. `kv_up`
    gives each head a key part of `plain_dim` and a value. The rotation pairs neighbours where `is_pairwise`.
    Norms are weight names.
    """

    down: LinearSpec
    q_norm: str | None
    q_up: LinearSpec | None
    kv_norm: str
    kv_up: LinearSpec
    o: LinearSpec
    num_heads: int
    latent_dim: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    rope: RopeParameters
    is_pairwise: bool
    latent_eps: float

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """All projections."""
        between = () if self.q_up is None else (self.q_up,)
        return (self.down, *between, self.kv_up, self.o)

    @property
    def cached_elements(self) -> int:
        """Elements that a token takes in the cache: the latent and the rotated key, which all heads share."""
        return self.latent_dim + self.rope_dim

    @property
    def attended_elements(self) -> int:
        """Elements a token of attention's queries and results: absorbed ones and a head's own."""
        absorbed = 2 * self.latent_dim + self.rope_dim
        return self.num_heads * (absorbed + self.plain_dim + self.rope_dim + self.value_dim)


AnyAttentionSpec = AttentionSpec | LatentAttentionSpec
