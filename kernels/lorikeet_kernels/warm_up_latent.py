"""Compile what latent attention can ever launch, before the first request. GPU only; once per process.

Splits, lengths, ranks, slots and sites are run-time values: what is left are a few choices of tiles.
"""

from dataclasses import dataclass, replace

import torch

from lorikeet_kernels.attention.attention_metadata import AttentionMetadata
from lorikeet_kernels.attention.latent_attention import latent_attention
from lorikeet_kernels.attention.latent_decode import kind_of_splits
from lorikeet_kernels.attention.latent_inputs import latent_inputs
from lorikeet_kernels.attention.latent_ring_kernels import can_ring
from lorikeet_kernels.attention.prompt_attention import prompt_attention
from lorikeet_kernels.dense.head_linear import head_linear
from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.launch.hopper import is_hopper
from lorikeet_kernels.lora.few_heads_lora import joined_heads
from lorikeet_kernels.lora.group_blocks import block_capacity
from lorikeet_kernels.lora.head_lora import HeadRows, head_lora, shares_columns
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.tiling import is_alone, select_block_m
from lorikeet_kernels.tiling.few_heads_tiles import takes_few_heads
from lorikeet_kernels.tiling.latent_tiles import select_latent_decode


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Sizes of a latent layer's heads, and where its queries lie: kernels are compiled for rows' strides too.

    Latent and key end the rows of one projection; with `is_query_beside` the queries begin them.
    """

    num_heads: int
    latent_dim: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    row_width: int
    is_query_beside: bool
    is_pairwise: bool
    projects_prompts: bool

    def rows(self, num_rows: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros as the layer has them: queries [T, H, plain + rope], latents and keys [T, latent + rope]."""
        dim = self.plain_dim + self.rope_dim
        row = like.new_zeros((num_rows, self.row_width))
        latents = row[:, self.row_width - self.latent_dim - self.rope_dim :]
        if self.is_query_beside:
            return row[:, : self.num_heads * dim].view(num_rows, self.num_heads, dim), latents
        return like.new_zeros((num_rows, self.num_heads, dim)), latents


def warm_up_latent_attention(
    cache: torch.Tensor,
    heads: LatentHeads,
    *,
    scale: float,
    max_requests: int,
    max_tokens: int,
    has_deltas: bool = False,
) -> int:
    """Launch each distinct kernel over the layer's own cache, block 0; returns how many batches it took.

    With `has_deltas` also those that add what adapters made beside the projections or in their launches.
    """
    seen: set[object] = set()
    block_tokens = cache.shape[1]
    blocks = -(-max_tokens // block_tokens)
    prepares = (None, False, True) if has_deltas else (None,)
    rings = can_ring(cache, heads.latent_dim, cache.dtype, on_hopper=is_hopper(cache))
    for num_requests in range(1, max_requests + 1):
        width = 1
        while True:
            tiles = select_latent_decode(
                num_requests, heads.num_heads, width * block_tokens, cache.itemsize, rings=rings
            )
            kind = replace(tiles, splits=kind_of_splits(tiles.splits))
            if kind not in seen:
                if not seen:
                    # a prompt of two tokens more: the kernels for several queries. What lies before them also
                    # of one row, whose stride is another one: torch views it as if it were contiguous
                    _attend(cache, heads, scale, num_requests, width, has_prompt=True, prepares=prepares)
                _attend(
                    cache, heads, scale, num_requests, width, has_prompt=False,
                    prepares=() if seen else prepares,
                )  # fmt: skip
                seen.add(kind)
            if width >= blocks:
                break
            width = min(2 * width, blocks)
    return len(seen)


def _attend(
    cache: torch.Tensor,
    heads: LatentHeads,
    scale: float,
    num_requests: int,
    width: int,
    *,
    has_prompt: bool,
    prepares: tuple[bool | None, ...],
) -> None:
    """Decodes, the last one a prompt of two with `has_prompt`, and, `prepares`, what lies before.

    For each of these that is without deltas (None), or with those of a launch that joined them or did not.
    """
    device = cache.device
    starts = torch.arange(num_requests + 1, dtype=torch.int32, device=device)
    starts[-1] += int(has_prompt)
    rows = num_requests + int(has_prompt)
    metadata = AttentionMetadata(
        query_starts=starts,
        sequence_lens=torch.full((num_requests,), 2, dtype=torch.int32, device=device),
        block_tables=torch.zeros((num_requests, width), dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(0, dtype=torch.int64, device=device),
        query_starts_host=(),
        sequence_lens_host=(),
    )
    q = cache.new_zeros((rows, heads.num_heads, heads.latent_dim + heads.rope_dim))
    latent_attention(q, cache, metadata, scale, q.new_empty((rows, heads.num_heads, heads.latent_dim)))
    if not prepares:
        return
    query, latents = heads.rows(rows, cache)
    latent, shared = latents.split((heads.latent_dim, heads.rope_dim), dim=1)
    places = torch.zeros(rows, dtype=torch.int64, device=device)
    table = torch.zeros((1, 2, heads.rope_dim // 2), dtype=torch.float32, device=device)
    query_delta, delta = heads.rows(rows, table)
    weight = cache.new_zeros(heads.latent_dim)
    for is_joined in prepares:
        latent_inputs(
            query, latent, shared, q, cache, places, places, table, weight, 1e-6,
            interleaved=heads.is_pairwise, query_delta=None if is_joined is None else query_delta,
            delta=None if is_joined is None else delta, delta_is_joined=bool(is_joined),
        )  # fmt: skip
    if heads.projects_prompts:
        up = q.new_zeros((rows, heads.num_heads, heads.plain_dim + heads.value_dim))
        out = q.new_empty((rows, heads.num_heads, heads.value_dim))
        prompt_attention(query, up, shared, metadata, scale, out, most_fresh=0)


def warm_up_heads(
    tables: LoraTables,
    workspace: LoraWorkspace,
    heads: LatentHeads,
    weight: torch.Tensor,
    *,
    site: int,
    max_tokens: int,
) -> int:
    """Launch each distinct kernel of the heads' projections and of LoRA on them, on base-only rows.

    `weight` [H, plain + value, latent] is a layer's; returns how many batches it took.
    """
    device, num_slots = tables.arena.device, tables.rank.shape[0]
    stride = heads.plain_dim + heads.value_dim
    width, latent_dim = heads.latent_dim + heads.rope_dim, heads.latent_dim
    key_rows = HeadRows(stride, 0, heads.plain_dim)
    value_rows = HeadRows(stride, heads.plain_dim, heads.value_dim)
    seen: set[object] = set()
    for num_tokens in range(1, max_tokens + 1):
        alone = is_alone(num_tokens, num_slots)
        block_m = None if alone else select_block_m(num_tokens, 1, num_slots)
        blocks = num_tokens if block_m is None else block_capacity(num_tokens, 1, num_slots, block_m)
        # one row has a stride of its own, see above
        few = takes_few_heads(num_tokens, device_name(weight))
        choice = (block_m, shares_columns(blocks, heads.num_heads), num_tokens == 1, few)
        if choice in seen:
            continue
        seen.add(choice)
        slots = torch.full((num_tokens,), -1, dtype=torch.int32, device=device)
        segments = make_lora_segments(slots, num_slots, workspace)
        plain = heads.rows(num_tokens, tables.arena)[0][..., : heads.plain_dim]
        sizes = (width, latent_dim, heads.value_dim)
        absorbed, sums, out = (tables.arena.new_zeros((num_tokens, heads.num_heads, size)) for size in sizes)
        for x, matrix, to, rows, down in (
            (plain, weight[:, : heads.plain_dim], absorbed[..., :latent_dim], key_rows, True),
            (sums, weight[:, heads.plain_dim :].transpose(1, 2), out, value_rows, False),
        ):
            head_linear(x, matrix, to)
            joined_heads(x, matrix, to, segments, tables, site, rows, down=down)
            head_lora(to, x, segments, tables, site, rows, down=down)
    return len(seen)
