"""Which routers are computed in parts, and with what tiles: pure functions of shapes and a device's name."""

from dataclasses import dataclass

from lorikeet_kernels.tiling.measured import MEASURED

MAX_ROWS = 64
MAX_EXPERTS = 256
MAX_SPLITS = 32

# Rows up to which parts were measured to be faster than cuBLAS, by the device's name. Microseconds of norm,
# router and routing on an H200, 1 and 64 rows (2026-12-01): gpt-oss-20b 3.5 and 3.9 instead of 7.5 and 8.3,
# Qwen3-30B-A3B 4.2 and 5.2 instead of 7.6 and 8.3, DeepSeek-V3 8.2 and 10.7 instead of 10.2 and 11.3.
MOST_ROWS: dict[str, int] = {"NVIDIA H200": 64}


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
    most = min(MAX_ROWS, MOST_ROWS.get(MEASURED.name(device), 0))
    if not 1 <= num_rows <= most or num_experts > MAX_EXPERTS or hidden % 8:
        return None
    return router_tiles(hidden)
