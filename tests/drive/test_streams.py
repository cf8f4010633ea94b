"""The streams of requests in flight: when the engine dies, what nobody knows is called unattributed."""

import asyncio

import pytest

from splittime.core.engine import EngineStats
from splittime.core.errors import Conflict
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.drive.client import StreamItem, Streams
from splittime.drive.messages import StepOutput
from splittime.ledger.account import Account, Mark
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.events import RequestOutput


def request(name: str, submitted_ns: int) -> Request:
    return Request(request_id=name, prompt_token_ids=(1, 2), sampling=SamplingParams(), submitted_ns=submitted_ns)


async def read_all(streams: Streams, name: str) -> list[StreamItem]:
    return [item async for item in streams.read(name)]


def test_what_the_dead_engine_did_after_its_last_news_is_unattributed() -> None:
    streams = Streams()
    streams.open(request("heard", 1_000))
    streams.open(request("unheard", 2_000))
    marks = (
        Mark(Stage.QUEUE, Cause.ENGINE_LOOP, 1_500),
        Mark(Stage.PREFILL, None, 1_600),
        Mark(Stage.DECODE, None, 5_000),
    )
    news = RequestOutput("heard", (7,), marks=marks)
    streams.put(StepOutput(3, 5_000, (news,), EngineStats(now_ns=5_000)))
    streams.end_all("it died")
    for name, begin_ns, last_news_ns, num_before in (("heard", 1_000, 5_000, 1), ("unheard", 2_000, 2_000, 0)):
        *before, last = asyncio.run(read_all(streams, name))
        assert len(before) == num_before
        assert last.output.finish_reason is FinishReason.ERROR
        assert last.output.error is not None
        assert last.output.error.code == "engine_died"
        account = Account(name, begin_ns, Stage.HANDOFF)
        for item in (*before, last):
            account.extend(item.output.marks)
        account.close(last.ready_ns)
        account.verify()
        lost = [i for i in account.intervals() if i.stage is Stage.UNATTRIBUTED]
        assert [(i.cause, i.begin_ns, i.end_ns) for i in lost] == [(Cause.ENGINE_DIED, last_news_ns, last.ready_ns)]
        assert account.stage is Stage.DELIVER


def test_each_reads_its_own_news_to_its_end_and_its_name_is_free_again() -> None:
    streams = Streams()
    for name in ("a", "b"):
        streams.open(request(name, 1_000))
    with pytest.raises(Conflict, match="'a' is in flight"):
        streams.open(request("a", 1_100))
    ends = [RequestOutput(name, (8,), finish_reason=FinishReason.STOP, freed_ns=6_000) for name in ("b", "a")]
    news = (RequestOutput("a", (7,)), RequestOutput("gone long ago", (1,)))
    streams.put(StepOutput(3, 5_000, news, EngineStats(now_ns=5_000)))
    streams.put(StepOutput(4, 6_000, tuple(ends), EngineStats(now_ns=6_000)))
    assert (len(streams), "a" in streams, "c" in streams) == (2, True, False)
    found = asyncio.run(read_all(streams, "a"))
    assert [(item.step_id, item.ready_ns, item.output.token_ids) for item in found] == [
        (3, 5_000, (7,)),
        (4, 6_000, (8,)),
    ]
    assert (len(streams), "a" in streams, "b" in streams) == (1, False, True)
    streams.open(request("a", 2_000))
    streams.end_all("it died")
    (last,) = asyncio.run(read_all(streams, "a"))
    assert last.output.marks[0].begin_ns == 2_000


async def test_a_reader_that_leaves_early_frees_the_name() -> None:
    streams = Streams()
    streams.open(request("a", 1_000))
    streams.put(StepOutput(3, 5_000, (RequestOutput("a", (7,)),), EngineStats(now_ns=5_000)))
    reading = streams.read("a")
    await anext(reading)
    await reading.aclose()
    assert len(streams) == 0
