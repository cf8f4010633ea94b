"""The same load by OpenAI's own client, which tries again: twice, where it got no answer at all, after half a second
and a second. What first tries came to is told by what its transport saw."""

import asyncio
import time
from typing import Any

import openai

from benchmarks.cluster.running import MODEL
from splittime.bench.book.records import Ending, Outcome, Phase
from splittime.bench.schedule import Planned, Schedule

TIMEOUT_S = 120.0


class WatchedTries(openai.DefaultAsyncHttpxClient):
    """num_lost: first tries without an answer."""

    num_lost = 0

    async def send(self, request: Any, **more: Any) -> Any:
        try:
            return await super().send(request, **more)
        except Exception:
            self.num_lost += request.headers["x-stainless-retry-count"] == "0"
            raise


async def tried_again(url: str, schedule: Schedule) -> tuple[list[Outcome], int]:
    """Returns what the requests came to in the end, on a clock that begins with the first, and how many first tries
    had no answer."""
    tries = WatchedTries(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT_S, http_client=tries, max_retries=2
    ) as client:
        begin_ns = time.monotonic_ns()
        outcomes = await asyncio.gather(*(_outcome(client, planned, begin_ns) for planned in schedule.requests))
    return outcomes, tries.num_lost


async def _outcome(client: openai.AsyncOpenAI, planned: Planned, begin_ns: int) -> Outcome:
    assert planned.at_ns is not None, "an open loop"
    assert not isinstance(planned.prompt, str), "token ids"
    await asyncio.sleep((planned.at_ns + begin_ns - time.monotonic_ns()) / 1e9)
    chunk_ns: list[int] = []
    ending, error = Ending.COMPLETE, None
    try:
        stream: Any = await client.completions.create(
            model=MODEL,
            prompt=list(planned.prompt),
            max_tokens=planned.output_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            chunk_ns.append(time.monotonic_ns() - begin_ns)
    except Exception as failure:  # of the client, or of what it is built on
        ending, error = Ending.FAILED, f"{type(failure).__name__}: {failure}"
    return Outcome(
        index=planned.index,
        request_id="",
        phase=Phase.MEASURED,
        ending=ending,
        intended_ns=planned.at_ns,
        chunk_ns=tuple(chunk_ns),
        error=error,
    )
