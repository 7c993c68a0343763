"""Requests of a load straight to the engine client."""

import itertools
import time
from collections.abc import Sequence
from typing import Protocol

from inference_service.domain.request import EngineRequest, FinishReason, RequestFinish
from inference_service.domain.sampling import SamplingParams
from inference_service.engine.engine_client import EngineClient
from lorikeet_bench.load.plan import PlannedRequest
from lorikeet_bench.load.record import OK, RequestRecord
from lorikeet_contract.status import ServiceError

_TENANT = "bench"


class Prompts(Protocol):
    """Where prompts come from, such as `load.prompts.TokenPrompts`."""

    def ids(self, request: PlannedRequest) -> tuple[int, ...]:
        """The tokens of a request's prompt."""
        ...


class EngineTarget:
    """Greedy requests of planned lengths that ignore the model's ends. Implements `load.record.Target`."""

    def __init__(self, client: EngineClient, prompts: Prompts, digests: Sequence[str]) -> None:
        self._client = client
        self._prompts = prompts
        self._digests = digests
        self._numbers = itertools.count()

    async def send(self, record: RequestRecord) -> None:
        """See `Target`."""
        planned = record.request
        record.prompt_token_ids = ids = self._prompts.ids(planned)
        request = EngineRequest(
            request_id=str(next(self._numbers)),
            tenant=_TENANT,
            prompt_token_ids=ids,
            sampling=SamplingParams(max_tokens=planned.output_tokens, temperature=0.0),
            digest=None if planned.adapter is None else self._digests[planned.adapter],
        )
        try:
            async for output in self._client.generate(request):
                if output.token_ids:
                    record.came_s.append(time.perf_counter())
                    record.counts.append(len(output.token_ids))
                    record.token_ids.extend(output.token_ids)
                if output.finish is not None:
                    _note_finish(record, output.finish)
        except ServiceError as error:
            record.status, record.message = error.reason, error.message

    def settle(self, record: RequestRecord) -> None:
        """Everything is read already."""


def _note_finish(record: RequestRecord, finish: RequestFinish) -> None:
    record.prompt_tokens = finish.prompt_tokens
    record.status = OK if finish.reason is FinishReason.LENGTH else finish.reason.upper()
