"""Which routers are computed in parts, and with what tiles: pure functions of shapes and a device's name."""

from dataclasses import dataclass

MAX_ROWS = 64
MAX_EXPERTS = 256
MAX_SPLITS = 32

# Rows up to which parts were measured to be faster than cuBLAS, by the device's name. None yet.
MOST_ROWS: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class RouterTiles:
    """A part is of `columns` columns of the weight, a power of two."""

    columns: int
    num_warps: int


def router_tiles(hidden: int) -> RouterTiles:
    """As many parts as a token's routing has on its way at once, none below 128 columns.

    The number of rows decides nothing: it would change the order in which a row's logits are added up.
    """
    columns = 128
    while -(-hidden // columns) > MAX_SPLITS:
        columns *= 2
    return RouterTiles(columns, 4)


def select_router(num_rows: int, num_experts: int, hidden: int, device: str) -> RouterTiles | None:
    """The tiles where parts are the faster way, None where the projection is."""
    if (
        not 1 <= num_rows <= min(MAX_ROWS, MOST_ROWS.get(device, 0))
        or num_experts > MAX_EXPERTS
        or hidden % 8
    ):
        return None
    return router_tiles(hidden)
