"""Observes a live server that keeps no ledger: two scrapes, its gauges between them, a small load if it is idle.

    observe(target, is_probing) -> Observation   its `run` is what `diagnose` reads

First it watches for `LISTEN_S`. A server that is at work is watched on, until `WATCH_S` are over, and is sent nothing:
its own load tells more. An idle one is sent `probe_spec`, unless that is not wanted: `AT_ONCE` requests at a time for
`PROBE_S`, prompts of which half is shared, so that slots, budget and prefix cache have something to show. What such a
load cannot tell, whoever reads `Observation.kind` must say: shares of a real load's time, overload, interference.
"""

import asyncio
import time
from enum import StrEnum
from typing import NamedTuple

import aiohttp
import msgspec

from splittime.bench import servers
from splittime.bench.book.records import Arm, Run, Sample
from splittime.bench.draw import draw
from splittime.bench.run import run_schedule
from splittime.bench.spec import LoadSpec
from splittime.core.errors import NotFound
from splittime.wire.dialects import DIALECTS
from splittime.wire.scrape import server_limits
from splittime.wire.target import RunOptions, Target

LISTEN_S, WATCH_S, PROBE_S = 2.0, 10.0, 8.0
AT_ONCE = 4
SAMPLE_S = 0.2  # a scrape costs a busy server some 10 ms
MOST_REQUESTS = 200
TIMEOUT_S = 30.0  # of a request of the probe
MOST_TOKENS, CONTEXT_SHARE = 768, 6  # the longest prompt, and at most a sixth of the context: a word is several tokens


class ServerKind(StrEnum):
    WATCHED = "watched"
    PROBED = "probed"


class Observation(NamedTuple):
    kind: ServerKind
    run: Run


async def observe(target: Target, is_probing: bool = True) -> Observation:
    """Raises `EngineError` if nothing answers there, `ConfigError` for a wrong key, `NotFound` for a server of a kind
    whose metrics are not known."""
    async with aiohttp.ClientSession() as session:
        arm = await servers.open_arm(session, target)
        if arm.kind not in DIALECTS:
            raise NotFound(f"{target.url} keeps no ledger, and is no server whose metrics are known here")
        begin_ns, begin_unix_ns = time.monotonic_ns(), time.time_ns()
        samples = await _watch(session, arm, target, begin_ns, LISTEN_S)
        if is_probing and not any(sample.waiting or sample.running for sample in samples):
            run = await probe(target)
            return Observation(ServerKind.PROBED, run)
        samples += await _watch(session, arm, target, begin_ns, WATCH_S)
        arm = await servers.close_arm(session, arm, target, ())
    span_ns = time.monotonic_ns() - begin_ns
    run = Run(
        begin_ns=begin_ns,
        begin_unix_ns=begin_unix_ns,
        measured_from_ns=0,
        measured_until_ns=span_ns,
        settings={"look": ServerKind.WATCHED.value},
        arms=(arm,),
        outcomes=(),
        samples=tuple(samples),
    )
    return Observation(ServerKind.WATCHED, run)


async def _watch(
    session: aiohttp.ClientSession, arm: Arm, target: Target, begin_ns: int, until_s: float
) -> list[Sample]:
    """Until so long after the begin."""
    samples = []
    while (at_ns := time.monotonic_ns() - begin_ns) < until_s * 1e9:
        gauges = await servers.sample(session, arm, target)
        samples.append(Sample(at_ns=at_ns, in_flight=0, **gauges._asdict()))
        await asyncio.sleep(SAMPLE_S)
    return samples


async def probe(target: Target) -> Run:
    """The small load. Its prompts are words: every server takes those, whatever its vocabulary."""
    limits = await server_limits(target)
    spec = probe_spec(limits.max_model_len)
    schedule = draw(spec, vocab_size=None, max_model_len=limits.max_model_len, salt=f"look {time.time_ns()}")
    options = RunOptions(workers=1, sample_interval_s=SAMPLE_S, timeout_s=TIMEOUT_S)
    run = await run_schedule(schedule, [target], options)
    return msgspec.structs.replace(run, settings={**run.settings, "look": ServerKind.PROBED.value})


def probe_spec(max_model_len: int | None) -> LoadSpec:
    """Short and long prompts, of which half is shared."""
    longest = min(MOST_TOKENS, (max_model_len or MOST_TOKENS) // CONTEXT_SHARE)
    return LoadSpec(
        concurrency=AT_ONCE,
        num_requests=MOST_REQUESTS,
        duration_s=PROBE_S,
        prompt_form="text",
        input_tokens=f"uniform:{max(1, longest // 8)}:{max(2, longest)}",
        output_tokens=str(max(1, min(32, longest // 4))),
        prefix_share=0.5,
    )


def what_is_sent() -> str:
    """Returns what is sent, for whoever is asked first."""
    return (
        f"an idle server is sent {AT_ONCE} requests at a time for {PROBE_S:g} s, of at most {MOST_TOKENS} words and 32 "
        "tokens of answer; a server that is at work is sent nothing (--no-probe: never)"
    )
