"""From a step's schedule to the tensors that the model reads; arrays only, no loop over tokens."""

from dataclasses import dataclass

import numpy as np
import torch

from inference_service.domain.step import ScheduledRequest
from inference_service.execution.device_copy import to_device
from inference_service.execution.request_table import RequestState, RequestTable
from inference_service.layers.batch import ForwardBatch, LayerCache, LoraBatch
from lorikeet_kernels.attention_metadata import AttentionMetadata
from lorikeet_kernels.linear import ROW_TILE
from lorikeet_kernels.lora_segments import make_lora_segments
from lorikeet_kernels.lora_tables import LoraTables
from lorikeet_kernels.lora_workspace import LoraWorkspace


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request's rows [begin, end) in the batch; row `begin` is position `position` of its sequence."""

    request_id: str
    state: RequestState
    begin: int
    end: int
    position: int

    @property
    def samples(self) -> bool:
        """Whether the rows reach the end of the known tokens, so that the last one predicts a new token."""
        return self.position + self.end - self.begin == self.state.num_tokens


class BatchBuilder:
    """Builds the forward batch of each step."""

    def __init__(
        self,
        table: RequestTable,
        cache: tuple[LayerCache, ...],
        tables: LoraTables,
        *,
        block_tokens: int,
        device: torch.device,
    ) -> None:
        self._table = table
        self._cache = cache
        self._tables = tables
        self._block_tokens = block_tokens
        self._device = device
        self._num_slots = int(tables.rank.shape[0])
        self._workspace = LoraWorkspace(device)
        self._spare_slot = (cache[0].keys.shape[0] - 1) * block_tokens

    def requests(self, scheduled: tuple[ScheduledRequest, ...]) -> list[BatchRequest]:
        """The step's requests with their rows, block tables extended."""
        requests: list[BatchRequest] = []
        begin = 0
        for share in scheduled:
            end = begin + share.num_scheduled_tokens
            state = self._table.schedule(share)
            requests.append(BatchRequest(share.request_id, state, begin, end, share.num_computed_tokens))
            begin = end
        return requests

    def build(self, requests: list[BatchRequest]) -> ForwardBatch:
        """The tensors of a step of at least one request."""
        starts = np.array([0, *(r.end for r in requests)], np.int32)
        counts = np.diff(starts)
        rows = np.array([r.state.row for r in requests])
        computed = np.array([r.position for r in requests])
        # A row's place in the batch; padding rows repeat the last one, and so touch no further expert.
        place = np.minimum(np.arange(self._padded(int(starts[-1]))), starts[-1] - 1)
        request_of = np.repeat(np.arange(len(requests)), counts)[place]
        positions = place + (computed - starts[:-1])[request_of]
        lengths = (computed + counts).astype(np.int32)
        num_blocks = -(-int(lengths.max()) // self._block_tokens)
        blocks = self._table.blocks[rows, :num_blocks]
        block, offset = np.divmod(positions, self._block_tokens)
        slot_mapping = blocks[request_of, block].astype(np.int64) * self._block_tokens + offset
        slot_mapping[starts[-1] :] = self._spare_slot
        attention = AttentionMetadata(
            query_starts=self.tensor(starts),
            sequence_lens=self.tensor(lengths),
            block_tables=self.tensor(blocks),
            slot_mapping=self.tensor(slot_mapping),
            query_starts_host=tuple(starts.tolist()),
            sequence_lens_host=tuple(lengths.tolist()),
        )
        return ForwardBatch(
            token_ids=self.tensor(self._table.tokens[rows[request_of], positions]),
            positions=self.tensor(positions),
            attention=attention,
            cache=self._cache,
            lora=self.lora(np.array([r.state.slot for r in requests], np.int32)[request_of]),
        )

    def lora(self, token_slot: np.ndarray) -> LoraBatch:
        """The adapters of rows with the given slots [T] int32."""
        segments = make_lora_segments(self.tensor(token_slot), self._num_slots, self._workspace)
        return LoraBatch(segments, self._tables, is_active=bool((token_slot >= 0).any()))

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """The array on the device."""
        return to_device(torch.from_numpy(array), self._device)

    def _padded(self, num_rows: int) -> int:
        # On a CPU every projection wants whole tiles of rows (lorikeet_kernels.linear says why): filling the
        # batch up once is cheaper than filling each projection's input.
        return -(-num_rows // ROW_TILE) * ROW_TILE if self._device.type == "cpu" else num_rows
