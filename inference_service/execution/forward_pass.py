"""The forward pass over a step's inputs on the device: what a graph captures, and what runs without one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inference_service.execution.step_buffers import StepInputs
from inference_service.layers.batch import ForwardBatch, LayerCache, LoraBatch
from inference_service.layers.decoder import Decoder
from lorikeet_kernels.attention.attention_metadata import AttentionMetadata
from lorikeet_kernels.lora.lora_segments import LoraSegments, make_lora_segments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.side_stream import SideStream
from lorikeet_kernels.sampling.pending_tokens import pending_tokens
from lorikeet_kernels.tiling.lora_overlap import BesideRows


@dataclass(frozen=True, slots=True, eq=False)
class Hidden:
    """Final hidden states [T, H] and the adapters of their rows. A graph's next replay overwrites them."""

    states: torch.Tensor
    lora: LoraBatch


class ForwardPass:
    """The model with its cache, its adapters and the tokens that the device keeps. One caller: the runner.

    In steps of fixed shapes the parts of LoRA that `lora_beside` names run on a second stream beside the
    base's ops: graphs keep that; without one the host's further calls would cost more than they bring.
    `sampled` holds the last token of each row of the request table, and of one row more that is nobody's.
    """

    def __init__(
        self,
        model: Decoder,
        cache: tuple[LayerCache, ...],
        tables: LoraTables,
        *,
        max_requests: int,
        lora_beside: BesideRows | None = None,
    ) -> None:
        device = cache[0].keys.device
        self.model = model
        self.cache = cache
        self.tables = tables
        self.workspace = LoraWorkspace(device)
        self._side = None if lora_beside is None else SideStream.on(device, lora_beside)
        self.sampled = torch.zeros(max_requests + 1, dtype=torch.int64, device=device)

    def run(
        self,
        inputs: StepInputs,
        *,
        has_adapters: bool,
        on_host: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> Hidden:
        """Enqueue the pass; keys and values are in the cache for the work enqueued from now on.

        `on_host` are query starts and lengths; a captured graph, whose inputs change, has none.
        """
        starts, lengths = on_host or (None, None)
        lora = self.lora(inputs.token_slot, has_adapters=has_adapters, beside=on_host is None)
        batch = ForwardBatch(
            token_ids=pending_tokens(inputs.token_ids, self.sampled),
            positions=inputs.positions,
            attention=AttentionMetadata(
                query_starts=inputs.query_starts,
                sequence_lens=inputs.sequence_lens,
                block_tables=inputs.block_tables,
                slot_mapping=inputs.slot_mapping,
                query_starts_host=None if starts is None else tuple(starts),
                sequence_lens_host=None if lengths is None else tuple(lengths),
            ),
            cache=self.cache,
            lora=lora,
            source_rows=inputs.source_rows if inputs.shape.pads else None,
        )
        return Hidden(self.model.forward(batch), lora)

    def lora(self, token_slot: torch.Tensor, *, has_adapters: bool, beside: bool = False) -> LoraBatch:
        """The adapters of rows with these slots [T] int32; `beside`: with the second stream."""
        num_slots = int(self.tables.rank.shape[0])
        if has_adapters or token_slot.device.type == "cpu":
            segments = make_lora_segments(token_slot, num_slots, self.workspace)
        else:  # nobody reads them, and sorting rows costs launches
            nothing = token_slot[:0]
            segments = LoraSegments(token_slot, nothing, nothing, num_slots, self.workspace)
        side = self._side if beside else None
        return LoraBatch(segments, self.tables, is_active=has_adapters, side=side)

    def logits(self, hidden: Hidden) -> torch.Tensor:
        """Logits [T, V] of all rows."""
        return self.model.logits(hidden.states, hidden.lora)

    def logits_of(self, hidden: Hidden, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of the given rows [N], whose slots are `slots`."""
        lora = self.lora(slots, has_adapters=hidden.lora.is_active)
        return self.model.logits(hidden.states.index_select(0, rows), lora)
