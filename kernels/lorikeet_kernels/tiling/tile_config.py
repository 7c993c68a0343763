"""The values that `select` returns and the kernels take."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class PairTiles:
    """Tiles of the one-launch decode kernel.

    `rows` of A by `block_k` a shrink program; `block_n` rows of B an expand program; `slot_scan` reads a
    site's table column ahead of the slot.
    """

    rows: int
    block_k: int
    block_n: int
    num_warps: int
    slot_scan: bool = True

    @property
    def key(self) -> tuple[int, ...]:
        """What distinguishes two launches' scratch layouts."""
        return tuple(int(value) for value in astuple(self))


@dataclass(frozen=True, slots=True)
class RegisterTiles:
    """Tiles of the one-launch kernel over blocks of tokens whose products come out of registers.

    `block_k` columns of A a shrink program, at least 64 a warp; `block_n` rows of B an expand program;
    `num_registers` a thread at most, 0 for the compiler's choice.
    """

    block_k: int
    block_n: int
    num_warps: int
    num_registers: int = 0

    @property
    def key(self) -> tuple[int, ...]:
        """What distinguishes two launches' scratch layouts."""
        return astuple(self)


@dataclass(frozen=True, slots=True)
class ShrinkTiles:
    """Tiles of a grouped shrink: `block_k` of the input a step, `splits` programs along it.

    A program takes `joined` blocks of a group as one.
    """

    block_k: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3
    joined: int = 1


@dataclass(frozen=True, slots=True)
class ExpandTiles:
    """Tiles of a grouped expand: `span` tiles of `block_n` columns a program."""

    block_n: int
    span: int = 1
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True, slots=True)
class OpShape:
    """What tiles depend on: an op, its sizes and how many pairs (tokens for a dense op) there are.

    `op` is "gate_up", "down" or "linear"; `max_rank` is the tables' bound.
    """

    op: str
    in_features: int
    out_features: int
    max_rank: int
    num_pairs: int
