"""One of the concurrent streams: asks, reads as its request's ending wants it, and hands all to the tally."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from lorikeet_bench.soak.exchange import Answer, Asked, Ending
from lorikeet_bench.soak.judge import Judge
from lorikeet_bench.soak.outage import Outage
from lorikeet_bench.soak.plan import SoakTarget
from lorikeet_bench.soak.relay import Relay
from lorikeet_bench.soak.request_mix import RequestMix
from lorikeet_bench.soak.tally import Tally
from lorikeet_client import (
    AsyncGenerationStream,
    AsyncLorikeet,
    BrokenReplyError,
    CallError,
    GenerateOptions,
    SamplingParams,
)

# No request may take longer, on the slowest machine: then it counts as hung.
_LONGEST_S = 180.0
_SLOW_READ_S = 0.05
# A client that leaves before the first token does so while it is queued or prefilled.
_EARLY_LEAVE_S = 0.05
_REFUSED_PAUSE_S = 0.02


class SoakStream:
    """Asks one request after the other until told to stop."""

    def __init__(
        self,
        target: SoakTarget,
        client: AsyncLorikeet,
        mix: RequestMix,
        judge: Judge,
        tally: Tally,
        outage: Outage,
    ) -> None:
        self._target = target
        self._client = client
        self._mix = mix
        self._judge = judge
        self._tally = tally
        self._outage = outage

    async def run(self, until_s: float) -> None:
        """Ask until then; a request that runs at that time is read to its end."""
        while time.monotonic() < until_s:
            answer = await self._exchange(self._mix.draw())
            if answer.code == "NOT_FOUND":
                await asyncio.sleep(_REFUSED_PAUSE_S)  # refusals cost nothing; they are not the load
            if answer.tokens or answer.code == "NOT_FOUND":
                self._outage.answered()
            elif answer.code == "UNAVAILABLE" and answer.left_s is None:
                self._outage.unavailable()
                await asyncio.sleep(self._outage.pause_s)

    async def _exchange(self, asked: Asked) -> Answer:
        answer = Answer(sent_s=time.monotonic())
        self._tally.opened()
        try:
            async with asyncio.timeout(_LONGEST_S), self._client_for(asked) as (client, relay):
                await self._converse(asked, answer, client, relay)
        except TimeoutError:
            answer.is_hung = True
        except BrokenReplyError as error:
            answer.broken = str(error)
        except CallError as error:
            answer.code, answer.message = error.code.name, error.message
        finally:
            answer.ended_s = time.monotonic()
            self._tally.closed()
        self._tally.judged(self._judge.verdict(asked, answer), len(answer.tokens))
        return answer

    @asynccontextmanager
    async def _client_for(self, asked: Asked) -> AsyncGenerator[tuple[AsyncLorikeet, Relay | None]]:
        """The shared client; where the connection is to be cut, one of its own through a relay."""
        if asked.ending is not Ending.DISCONNECT or self._target.tls is not None:
            yield self._client, None
            return
        async with Relay(self._target.inference) as relay, self._target.client(relay.address) as client:
            yield client, relay

    async def _converse(
        self, asked: Asked, answer: Answer, client: AsyncLorikeet, relay: Relay | None
    ) -> None:
        options = GenerateOptions(
            token_ids=asked.prompt,
            request_id=asked.request_id,
            sampling=SamplingParams(
                temperature=0.0,
                max_tokens=asked.max_tokens,
                stop_token_ids=() if asked.stop_token is None else (asked.stop_token,),
            ),
        )
        if asked.reference is not None:
            options["adapter"] = asked.reference
        async with client.generate(timeout_s=asked.deadline_s, **options) as stream:
            if asked.after_tokens == 0 and asked.ending in {Ending.CANCEL, Ending.ABORT, Ending.DISCONNECT}:
                await asyncio.sleep(self._mix.uniform(0, _EARLY_LEAVE_S))
                if not await self._leave(asked, answer, client, stream, relay):
                    return
            await self._read(asked, answer, client, stream, relay)

    async def _read(
        self,
        asked: Asked,
        answer: Answer,
        client: AsyncLorikeet,
        stream: AsyncGenerationStream,
        relay: Relay | None,
    ) -> None:
        async for delta in stream:
            if answer.first_s is None:
                answer.first_s = time.monotonic()
            answer.tokens += [token.id for token in delta.tokens]
            answer.finish = delta.finish
            if asked.ending is Ending.SLOW:
                await asyncio.sleep(_SLOW_READ_S)
            is_time = len(answer.tokens) >= asked.after_tokens and answer.left_s is None
            leaves = asked.ending in {Ending.CANCEL, Ending.ABORT, Ending.DISCONNECT}
            if leaves and is_time and not await self._leave(asked, answer, client, stream, relay):
                return

    async def _leave(
        self,
        asked: Asked,
        answer: Answer,
        client: AsyncLorikeet,
        stream: AsyncGenerationStream,
        relay: Relay | None,
    ) -> bool:
        """End the request from this side; True if there is still something to read."""
        answer.left_s = time.monotonic()
        if asked.ending is Ending.ABORT:
            await client.abort(asked.request_id)
            return True
        if relay is not None:
            relay.cut()
            return True
        stream.close()
        return False
