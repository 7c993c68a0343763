"""What a soak does: sizes, times, and where the services are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lorikeet_bench.rigs import RigShape, write_copy_base
from lorikeet_client import AsyncLorikeet, ClientTls

# Wide enough for 63 watermarks, small enough for a step of a few milliseconds on a CPU.
SOAK_SHAPE = RigShape(vocab=64, layers=2, experts=8, top_k=2, intermediate=16)
# What comes after token t where no adapter answers: a ring, so that a lost or doubled token shows in base
# answers too. Token 0 carries the cached-values mark and is never prompted, walked to or forced.
SUCCESSOR = {token: token % (SOAK_SHAPE.vocab - 1) + 1 for token in range(1, SOAK_SHAPE.vocab)}


@dataclass(frozen=True, slots=True)
class SoakTarget:
    """A running stack.

    Args:
        processes: processes to weigh, by name; their children are weighed too, each by itself.
        disk: directories whose size must return, by name.
    """

    inference: str
    manager: str
    token: str | None = field(repr=False)
    tenant: str
    tls: ClientTls | None = None
    processes: Mapping[str, int] = field(default_factory=dict[str, int])
    disk: Mapping[str, Path] = field(default_factory=dict[str, Path])

    def client(self, inference: str = "") -> AsyncLorikeet:
        """A fresh client, of another address of the same inference service if one is given."""
        return AsyncLorikeet(inference or self.inference, self.manager, self.token, self.tls)


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """How much and how long. Equal seeds draw equal requests; their timing is the machine's."""

    duration_s: float
    streams: int = 64
    adapters: int = 32
    churners: int = 4
    # Mean pause of a churner between two operations.
    churn_pause_s: float = 0.25
    seed: int = 1
    # Caches, pools and allocators fill up during this time; memory is judged after it.
    warm_up_s: float = 60.0
    # How long counters and files may take to come back; a pending load or a slow disk ends long before.
    return_s: float = 60.0


def write_soak_base(path: Path) -> Path:
    """Write the base model that a soak must be run against."""
    return write_copy_base(path, SOAK_SHAPE, successor=SUCCESSOR, cached_mark=True)


def base_answer(last_prompt_token: int, count: int) -> tuple[int, ...]:
    """What the base model answers to a prompt that ends with this token."""
    walked: list[int] = []
    token = last_prompt_token
    for _ in range(count):
        token = SUCCESSOR[token]
        walked.append(token)
    return tuple(walked)
