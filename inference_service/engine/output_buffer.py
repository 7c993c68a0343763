"""Outputs of one request, all its samples, between the engine and a consumer that may be slower."""

import asyncio
from collections import deque
from dataclasses import dataclass, replace

from inference_service.domain.errors import SlowClientError
from inference_service.domain.request import RequestOutput
from lorikeet_contract.status import ServiceError

# (id, logprob) pairs that may wait for one consumer; 8 bytes each, and more for a token that has but one.
MAX_WAITING_PAIRS = 4_000_000
# Each output is made into text at one go, on the front end's event loop.
_MAX_MERGED_TOKENS = 64


@dataclass(slots=True)
class _Waiting:
    output: RequestOutput


class OutputBuffer:
    """Keeps each sample's outputs in order. Those without log-probabilities are merged, within a bound."""

    def __init__(self, max_pairs: int = MAX_WAITING_PAIRS) -> None:
        self._max_pairs = max_pairs
        self._outputs: deque[_Waiting] = deque()
        self._last_of: dict[int, _Waiting] = {}
        self._num_pairs = 0
        self._error: ServiceError | None = None
        self._is_ready = asyncio.Event()

    def put(self, output: RequestOutput) -> bool:
        """Add an output. False: too much waits, the consumer gets an error after it; the request must end."""
        if self._error is not None:
            return True
        self._num_pairs += _num_pairs(output)
        if self._num_pairs > self._max_pairs and self._outputs:
            self.fail(
                SlowClientError(
                    f"more than {self._max_pairs} log-probabilities wait to be read; read the stream faster "
                    "or ask for fewer",
                    metadata={
                        "field": "sampling.logprobs",
                        "limit": "max_waiting_logprobs",
                        "value": str(self._num_pairs),
                        "maximum": str(self._max_pairs),
                    },
                )
            )
            return False
        last = self._last_of.get(output.index)
        if last is not None and _can_merge(last.output, output):
            last.output = replace(output, token_ids=last.output.token_ids + output.token_ids)
            return True
        self._last_of[output.index] = waiting = _Waiting(output)
        self._outputs.append(waiting)
        self._is_ready.set()
        return True

    def fail(self, error: ServiceError) -> None:
        """Let `get` raise once what came before was read."""
        if self._error is None:
            self._error = error
            self._is_ready.set()

    async def get(self) -> RequestOutput:
        """The next output; raises what `fail` was given after the last one."""
        await self._is_ready.wait()
        if not self._outputs:
            assert self._error is not None
            raise self._error
        waiting = self._outputs.popleft()
        output = waiting.output
        if self._last_of.get(output.index) is waiting:
            del self._last_of[output.index]
        self._num_pairs -= _num_pairs(output)
        if not self._outputs and self._error is None:
            self._is_ready.clear()
        return output


def _can_merge(last: RequestOutput, output: RequestOutput) -> bool:
    is_small = len(last.token_ids) + len(output.token_ids) <= _MAX_MERGED_TOKENS
    return is_small and _is_plain(last) and _is_plain(output)


def _is_plain(output: RequestOutput) -> bool:
    return not output.logprobs and not output.prompt_logprobs


def _num_pairs(output: RequestOutput) -> int:
    pairs = sum(1 + entry.num_top for entry in output.logprobs)
    return pairs + sum(1 + entry.num_top for entry in output.prompt_logprobs if entry is not None)
