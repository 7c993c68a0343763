"""From a step's schedule to the arrays that the model and the sampler read; no loop over tokens."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from inference_service.domain.step import ScheduledRequest
from inference_service.execution.request_table import Places, RequestState, RequestTable
from inference_service.execution.step_buffers import HostArrays, StepBuffers, StepInputs, StepShape
from inference_service.execution.step_shapes import StepShapes
from lorikeet_kernels.dense.linear import ROW_TILE
from lorikeet_kernels.sampling.sampling import SamplingBatch


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """A step's inputs, on their way to the device, and what the host has to know of them.

    Request i has rows [starts[i], starts[i + 1]), at positions [computed[i], lengths[i]) of its sequence.
    `places` are where the tokens that it samples will stand in the request table.
    `samplers` are the indices of the requests whose last row predicts a new token, in the order of the
    sampling arrays. A batch of fixed shape may have further rows, and one whose every row samples
    (`samples_all`: decodes) samples from those too.
    """

    inputs: StepInputs
    states: list[RequestState]
    starts: NDArray[np.int64]
    computed: NDArray[np.int64]
    lengths: NDArray[np.int64]
    samplers: list[int]
    places: Places
    has_adapters: bool
    sampling: SamplingBatch
    is_fixed: bool = False
    samples_all: bool = False

    @property
    def sampled_states(self) -> list[RequestState]:
        """The requests that sample."""
        return self.states if self.samples_all else [self.states[index] for index in self.samplers]

    @property
    def num_rows(self) -> int:
        """Rows that belong to requests."""
        return int(self.starts[-1])


@dataclass(frozen=True, slots=True, eq=False)
class _Gathered:
    """A step's requests as arrays [R]."""

    rows: NDArray[np.int64]
    computed: NDArray[np.int64]
    lengths: NDArray[np.int64]


class BatchBuilder:
    """Builds the batch of each step in the step buffers. One caller: the model runner.

    Args:
        table: what is known of the requests.
        buffers: where the arrays go.
        shapes: that steps are filled up to.
        block_tokens: tokens of a cache block.
        spare_slot: the cache's place for rows that belong to no request.
        device: where steps run.
    """

    def __init__(
        self,
        table: RequestTable,
        buffers: StepBuffers,
        shapes: StepShapes,
        *,
        block_tokens: int,
        spare_slot: int,
        device: torch.device,
    ) -> None:
        self.shapes = shapes
        self._table = table
        self._buffers = buffers
        self._block_tokens = block_tokens
        self._spare_slot = spare_slot
        self._device = device
        self._ascending = np.arange(table.max_requests + 1)

    def build(self, scheduled: tuple[ScheduledRequest, ...]) -> StepBatch:
        """The arrays of a step of at least one request; block tables are extended."""
        states = self._table.schedule(scheduled)
        count = len(states)
        rows = np.fromiter([state.row for state in states], np.int64, count)
        computed = np.fromiter([share.num_computed_tokens for share in scheduled], np.int64, count)
        counts = np.fromiter([share.num_scheduled_tokens for share in scheduled], np.int64, count)
        lengths = computed + counts
        known = np.fromiter([state.num_tokens for state in states], np.int64, count)
        step = _Gathered(rows, computed, lengths)
        samples = lengths == known
        longest = int(lengths.max())
        if counts.max() == 1 and samples.all():
            shape = self.shapes.pick(count, longest)
            if shape is not None:
                return self._decode(states, step, shape)
        fixed = self.shapes.pick_mixed(int(counts.sum()), longest)
        return self._mixed(states, step, samples, fixed)

    def idle(self, shape: StepShape) -> StepInputs:
        """A fixed shape's inputs for a step of no request: every row pads."""
        self._buffers.keep(shape)
        nothing = np.empty(0, np.int64)
        step = _Gathered(nothing, nothing, nothing)
        if shape.is_decode:
            return self._decode([], step, shape).inputs
        return self._mixed([], step, np.empty(0, np.bool_), shape).inputs

    def _decode(self, states: list[RequestState], step: _Gathered, shape: StepShape) -> StepBatch:
        """One row a request, filled up to a fixed shape by rows that belong to none.

        Those read nothing (no tokens, slot -1), write to the spare block and go where the last request's row
        goes, so that they touch no further expert.
        """
        count, table, size = len(states), self._table, self._block_tokens
        rows, computed = step.rows, step.computed

        def write(host: HostArrays) -> None:
            host.token_ids[:count] = table.tokens[rows, computed]
            host.positions[:count] = computed
            blocks = table.blocks[rows, computed // size]
            host.slot_mapping[:count] = blocks * np.int64(size) + computed % size
            host.token_slot[:count] = table.slot[rows]
            host.query_starts[:] = self._ascending[: shape.num_requests + 1]
            host.sequence_lens[:count] = step.lengths
            host.block_tables[:count] = table.blocks[rows, : shape.table_width]
            if shape.pads:
                host.source_rows[:count] = self._ascending[:count]
                host.source_rows[count:] = max(0, count - 1)
            for values, filler in (
                (host.token_ids, 0), (host.positions, 0), (host.slot_mapping, self._spare_slot),
                (host.token_slot, -1), (host.sequence_lens, 0), (host.block_tables, 0),
            ):  # fmt: skip
                values[count:] = filler
            host.sample_rows[:] = self._ascending[: shape.num_samples]
            host.sample_slots[:] = host.token_slot
            self._write_sampling(host, rows, step.lengths)

        starts, samplers = self._ascending[: count + 1], list(range(count))
        inputs = self._buffers.fill(shape, write)
        traits = self._traits(rows, rows, inputs)
        places = (rows, step.lengths)
        return StepBatch(
            inputs, states, starts, computed, step.lengths, samplers, places, *traits,
            is_fixed=True, samples_all=True,
        )  # fmt: skip

    def _mixed(
        self,
        states: list[RequestState],
        step: _Gathered,
        samples: NDArray[np.bool_],
        fixed: StepShape | None,
    ) -> StepBatch:
        """Prefill chunks and decodes side by side, maybe filled up to a fixed shape as `_decode` does.

        The requests that fill it up have no rows.
        """
        table, size, num_requests = self._table, self._block_tokens, len(states)
        rows, computed = step.rows, step.computed
        counts = step.lengths - computed
        starts = np.concatenate(([0], np.cumsum(counts)))
        num_rows = int(starts[-1])
        samplers = np.flatnonzero(samples)
        if fixed is None:
            width = -(-int(step.lengths.max()) // size)
            shape = StepShape(self._padded(num_rows), num_requests, width, len(samplers))
        else:
            shape = replace(fixed, num_samples=len(samplers))

        def write(host: HostArrays) -> None:
            self._write_rows(host, step, starts)
            host.query_starts[: num_requests + 1] = starts
            host.query_starts[num_requests + 1 :] = num_rows
            host.sequence_lens[:num_requests] = step.lengths
            host.sequence_lens[num_requests:] = 0
            host.block_tables[:num_requests] = table.blocks[rows, : shape.table_width]
            host.block_tables[num_requests:] = 0
            if shape.pads:
                host.token_slot[num_rows:] = -1
                host.source_rows[:] = np.minimum(np.arange(shape.num_rows), max(0, num_rows - 1))
            host.sample_rows[:] = starts[1:][samplers] - 1
            host.sample_slots[:] = table.slot[rows[samplers]]
            self._write_sampling(host, rows[samplers], step.lengths[samplers])

        inputs = self._buffers.fill(shape, write)
        traits = self._traits(rows, rows[samplers], inputs)
        places = (rows[samplers], step.lengths[samplers])
        return StepBatch(
            inputs, states, starts, computed, step.lengths, samplers.tolist(), places, *traits,
            is_fixed=fixed is not None,
        )  # fmt: skip

    def _write_rows(self, host: HostArrays, step: _Gathered, starts: NDArray[np.int64]) -> None:
        """What each row reads and where it writes. Those that pad the batch repeat its last one.

        So they touch no further expert, where all rows are computed alike.
        """
        table, size, num_rows = self._table, self._block_tokens, int(starts[-1])
        if num_rows == 0:
            for values, filler in (
                (host.token_ids, 0), (host.positions, 0), (host.token_slot, -1),
                (host.slot_mapping, self._spare_slot),
            ):  # fmt: skip
                values[:] = filler
            return
        place = np.minimum(np.arange(len(host.token_ids)), num_rows - 1)
        request_of = np.repeat(np.arange(len(step.rows)), np.diff(starts))[place]
        positions = place + (step.computed - starts[:-1])[request_of]
        row = step.rows[request_of]
        block, offset = np.divmod(positions, size)
        host.token_ids[:] = table.tokens[row, positions]
        host.positions[:] = positions
        host.slot_mapping[:] = table.blocks[row, block].astype(np.int64) * size + offset
        host.slot_mapping[num_rows:] = self._spare_slot
        host.token_slot[:] = table.slot[row]

    def _traits(
        self, rows: NDArray[np.int64], sampled: NDArray[np.int64], inputs: StepInputs
    ) -> tuple[bool, SamplingBatch]:
        """Whether any row has an adapter, and what the rows that are sampled from ask for."""
        table = self._table
        draws = table.temperature[sampled] > 0
        drawn = sampled[draws]
        any_top_k = bool((table.top_k[drawn] > 0).any())
        any_top_p = bool((table.top_p[drawn] < 1).any())
        sampling = SamplingBatch(
            temperature=inputs.temperature,
            top_k=inputs.top_k,
            top_p=inputs.top_p,
            seed=inputs.seed,
            position=inputs.position,
            all_greedy=not len(drawn),
            any_cut=any_top_k or any_top_p,
            any_top_k=any_top_k,
            any_top_p=any_top_p,
            min_p=inputs.min_p if (table.min_p[drawn] > 0).any() else None,
        )
        return bool((table.slot[rows] >= 0).any()), sampling

    def _write_sampling(self, host: HostArrays, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Parameters of the rows that are sampled from; those that fill a shape up are greedy, nobody's."""
        count, table = len(rows), self._table
        for values, of_row, filler in (
            (host.seed, table.seed, 0), (host.top_k, table.top_k, 0), (host.top_p, table.top_p, 1),
            (host.min_p, table.min_p, 0), (host.temperature, table.temperature, 0),
        ):  # fmt: skip
            values[:count] = of_row[rows]
            values[count:] = filler
        host.places[:count] = rows
        host.places[count:] = table.max_requests
        host.position[:count] = lengths
        host.position[count:] = 0

    def _padded(self, num_rows: int) -> int:
        # On a CPU every projection wants whole tiles of rows (lorikeet_kernels.dense.linear says why): to
        # fill the batch up once is cheaper than filling each projection's input.
        return -(-num_rows // ROW_TILE) * ROW_TILE if self._device.type == "cpu" else num_rows
