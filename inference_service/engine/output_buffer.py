"""Outputs of one request between the engine and a consumer that may be slower."""

import asyncio
from collections import deque

from inference_service.domain.errors import SlowClientError
from inference_service.domain.request import RequestOutput
from lorikeet_contract.status import ServiceError

# (id, logprob) pairs that may wait for one consumer; 8 bytes each, and more for a token that has but one.
MAX_WAITING_PAIRS = 4_000_000
# Each output is made into text at one go, on the front end's event loop.
_MAX_MERGED_TOKENS = 64


class OutputBuffer:
    """Keeps outputs in order. Waiting ones without log-probabilities are merged, within a bound."""

    def __init__(self, max_pairs: int = MAX_WAITING_PAIRS) -> None:
        self._max_pairs = max_pairs
        self._outputs: deque[RequestOutput] = deque()
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
                    "or ask for fewer"
                )
            )
            return False
        if self._outputs and _can_merge(self._outputs[-1], output):
            last = self._outputs.pop()
            output = RequestOutput(output.request_id, last.token_ids + output.token_ids, finish=output.finish)
        self._outputs.append(output)
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
        output = self._outputs.popleft()
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
