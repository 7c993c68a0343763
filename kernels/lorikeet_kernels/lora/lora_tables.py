"""Where the kernels find adapters: one arena and, per (slot, site), where A and B start and at which rank."""

from dataclasses import dataclass, field

import numpy as np
import torch

BASE_SLOT = -1
MAX_SITES = 3
"""Sites that one launch takes, side by side."""


@dataclass(frozen=True, slots=True)
class HostTables:
    """The same tables as numpy arrays [S, sites], for the references: entries cost a tenth of a tensor's."""

    a_offset: np.ndarray
    b_offset: np.ndarray
    rank: np.ndarray
    num_a: np.ndarray


@dataclass(frozen=True, slots=True)
class LoraTables:
    """Device tables of all slots, S of them, over the model's sites. Shapes are fixed for the process's life.

    A site without weights has rank 0. Offsets count elements from the arena's start and are multiples of
    256 bytes; A and B are laid out as `lorikeet_contract.manifest` says, R being the padded rank, with the
    scaling multiplied into B. Contents change between steps only, by the arena's owner.
    """

    arena: torch.Tensor  # [N] compute dtype, contiguous, its start 256-byte aligned
    a_offset: torch.Tensor  # [S, sites] int64
    b_offset: torch.Tensor  # [S, sites] int64
    rank: torch.Tensor  # [S, sites] int32, padded to a multiple of 8; 0 where absent
    num_a: torch.Tensor  # [S, sites] int32, 1 or 2
    max_rank: int = 256  # no entry of `rank` ever exceeds it; kernels are compiled for it
    # Views of the above where they are in host memory, so that they follow every change; None on a GPU.
    shared_host: HostTables | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_rank < 1:
            raise ValueError(f"tables' max_rank is {self.max_rank}: kernels are compiled for 1 or more")
        shared = None if self.rank.is_cuda else self.copy_to_host()
        object.__setattr__(self, "shared_host", shared)

    def check_sites(self, *sites: int) -> None:
        """Raise ValueError unless one launch can take these: kernels look them up unchecked."""
        num_sites = self.rank.shape[1]
        if not 1 <= len(sites) <= MAX_SITES or min(sites) < 0 or max(sites) >= num_sites:
            raise ValueError(
                f"{len(sites)} sites {sites}: one call fuses 1 to {MAX_SITES} of the tables' {num_sites}"
            )

    def padded_sites(self, sites: tuple[int, ...]) -> tuple[int, ...]:
        """As many as kernels take, the first one repeated; ValueError as from `check_sites`."""
        self.check_sites(*sites)
        return (*sites, *sites[:1] * (MAX_SITES - len(sites)))

    def copy_to_host(self) -> HostTables:
        """The tables as they are now; waits for the device. In host memory no bytes are copied."""
        tables = (self.a_offset, self.b_offset, self.rank, self.num_a)
        return HostTables(*(table.cpu().numpy() for table in tables))
