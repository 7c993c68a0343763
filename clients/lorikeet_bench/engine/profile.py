"""Profiles of decode steps, in an engine process of their own."""

import asyncio
import os
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from inference_service.domain.errors import EngineDeadError
from lorikeet_bench.engine.decode_profile import DecodeProfile
from lorikeet_bench.engine.launch import loaded_engine
from lorikeet_bench.engine.plan import EnginePlan
from lorikeet_bench.engine.profile_watch import QUIET_STEPS, ROWS_VARIABLE, STEPS_VARIABLE, profile_file
from lorikeet_bench.engine.settings import runs_on_gpu
from lorikeet_bench.engine.target import EngineTarget
from lorikeet_bench.engine.watched_runner import TRACE_VARIABLE
from lorikeet_bench.load.lengths import LoadError
from lorikeet_bench.load.plan import PlannedRequest
from lorikeet_bench.load.prompts import TokenPrompts
from lorikeet_bench.load.record import RequestRecord

_FACTORY = "lorikeet_bench.engine.profile_watch:load_profiled_backend"
_SPARE_STEPS = 8
# Of Kineto, by which torch.profiler records: it writes that it starts and that it stops; on a GPU also what
# CUPTI lacks.
_LOG_LEVEL_VARIABLE, _NO_LOG = "KINETO_LOG_LEVEL", "6"
# Prompt tokens that a step takes at the least, next to decodes.
_STEP_TOKENS = 1024


def output_tokens(rows: int, input_tokens: int, num_steps: int) -> int:
    """How long answers must be: the first to be prefilled must outlast the others' prompts and all steps."""
    return -(-rows * input_tokens // _STEP_TOKENS) + rows + QUIET_STEPS + num_steps + _SPARE_STEPS


async def profile_decodes(
    plan: EnginePlan, points: Sequence[tuple[int, int]], *, input_tokens: int, num_steps: int
) -> list[DecodeProfile]:
    """On one engine, profile `num_steps` decode steps of each point: so many requests over so many adapters.

    Raises:
        LoadError: the engine could not start, or a point's requests never decoded all at once.
    """
    with _traces([rows for rows, _ in points], num_steps, is_quiet=not runs_on_gpu(plan)) as directory:
        try:
            async with loaded_engine(plan, (), _FACTORY) as engine:
                target = EngineTarget(
                    engine.client,
                    TokenPrompts(1, engine.client.info.vocab_size),
                    [adapter.digest for adapter in engine.store.adapters],
                )
                profiles: list[DecodeProfile] = []
                for index, (rows, adapters) in enumerate(points):
                    await _send(target, rows, adapters, input_tokens, num_steps)
                    profiles.append(_read(profile_file(directory, index), rows))
        except EngineDeadError as error:
            raise LoadError(error.message) from error
    return profiles


async def _send(target: EngineTarget, rows: int, adapters: int, input_tokens: int, num_steps: int) -> None:
    records = [
        RequestRecord(
            PlannedRequest(
                index=index,
                input_tokens=input_tokens,
                output_tokens=output_tokens(rows, input_tokens, num_steps),
                adapter=index % adapters if adapters else None,
                arrival_s=None,
                prompt_seed=(1, index),
            )
        )
        for index in range(rows)
    ]
    await asyncio.gather(*(target.send(record) for record in records))
    if failed := [record for record in records if not record.is_ok]:
        raise LoadError(f"a request ended with {failed[0].status}: {failed[0].message}")


def _read(trace: Path, rows: int) -> DecodeProfile:
    try:
        data = trace.read_bytes()
    except FileNotFoundError as error:
        raise LoadError(
            f"{rows} requests never decoded all at once: give the engine room for as many "
            "(max_running_requests, num_blocks)"
        ) from error
    return msgspec.json.decode(data, type=DecodeProfile)


@contextmanager
def _traces(rows: Sequence[int], num_steps: int, *, is_quiet: bool) -> Generator[Path]:
    with tempfile.TemporaryDirectory(prefix="lorikeet-profile-") as directory:
        given = {
            TRACE_VARIABLE: directory,
            ROWS_VARIABLE: ",".join(map(str, rows)),
            STEPS_VARIABLE: str(num_steps),
        }
        if is_quiet and _LOG_LEVEL_VARIABLE not in os.environ:
            given[_LOG_LEVEL_VARIABLE] = _NO_LOG
        os.environ.update(given)
        try:
            yield Path(directory)
        finally:
            for name in given:
                del os.environ[name]
