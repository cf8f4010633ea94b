"""What the way in costs: direct, through our gateway, and through Ray Serve's own proxy, in one run.

    python -m benchmarks.cluster.ways_in [--runner ray] [--replicas 1 2] [--json]
    python -m benchmarks.cluster.ways_in --small         a trial: few requests, no figures to be quoted

`splittime up` starts so many replicas, as processes or as Ray's actors. A closed loop of so many streams of 32 tokens
asks them direct (in halves, where there are two), through the gateway, and through a Ray Serve application with as many
replicas, which pass on what they get to the same servers in turn; without `ray[serve]` that arm is left out, and
said so. The arms take turns there and back, so that a slow drift of the machine cancels.

* ttft_ms: from the last byte given to the socket to the first chunk read; itl_ms: between chunks of an answer
* added_ttft_ms, added_itl_ms: the difference of percentiles to direct

All processes share the machine's cores; the servers' own work is the same in each arm. It takes at most `LIMIT_S`, then
it fails; and ends with 1 where the gateway lost requests.
"""

import argparse
import asyncio
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.cluster.running import MODEL, RunningCluster, cluster_of, ends_within, say
from benchmarks.report import file_result
from benchmarks.server_process import free_port
from splittime.bench.book.records import Ending, Outcome
from splittime.bench.book.requests import service_ttft_ns
from splittime.bench.event_loop import run_loop
from splittime.bench.run import run_schedule
from splittime.bench.schedule import Planned, Schedule
from splittime.ledger.derive import percentiles
from splittime.wire.target import RunOptions, Target

TOKENS, MS = 32, 1_000_000
LIMIT_S = 900.0
STREAMS = (1, 8, 32, 128)
PROMPT = tuple(range(16))
REPLICA = "[serve]\nmax_num_seqs = 128\nnum_threads = 1\nmax_queued_requests = 1024\n[replica]\ncpus = 0.2\n"


async def ask_all(urls: Sequence[str], streams: int, requests: int) -> list[Outcome]:
    """Returns what became of the requests, of which each address has an equal share; no more addresses than streams."""
    urls = urls[:streams]
    runs = await asyncio.gather(
        *(one_loop(url, max(1, streams // len(urls)), max(1, requests // len(urls))) for url in urls)
    )
    return [outcome for outcomes in runs for outcome in outcomes]


async def one_loop(url: str, streams: int, requests: int) -> list[Outcome]:
    planned = tuple(Planned(index=n, at_ns=None, output_tokens=TOKENS, prompt=PROMPT) for n in range(requests))
    schedule = Schedule(seed=0, requests=planned, concurrency=streams)
    return list((await run_schedule(schedule, [Target(url=url, model=MODEL)], RunOptions())).outcomes)


def measure(arms: dict[str, list[str]], streams: int, requests: int) -> dict[str, Any]:
    found: dict[str, list[Outcome]] = {name: [] for name in arms}
    for urls in arms.values():  # connections are opened, code is warm
        run_loop(ask_all(urls, streams, streams))
    for name in (*arms, *reversed(arms)):
        found[name] += run_loop(ask_all(arms[name], streams, requests))
    figures = {name: figures_of(outcomes) for name, outcomes in found.items()}
    added = {
        f"added_{what}": {name: minus(told[what], figures["direct"][what]) for name, told in figures.items()}
        for what in ("ttft_ms", "itl_ms")
    }
    return {"streams": streams, **figures, **added}


def figures_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    whole = [one for one in outcomes if one.ending is Ending.COMPLETE]
    ttft_ms = [ns / MS for one in whole if (ns := service_ttft_ns(one)) is not None]
    gaps_ms = [(later - sooner) / MS for one in whole for sooner, later in pairwise(one.chunk_ns)]
    return {
        "requests": len(outcomes),
        "complete": len(whole),
        "ttft_ms": percentiles(ttft_ms, (50, 99)) if ttft_ms else {},
        "itl_ms": percentiles(gaps_ms, (50, 99)) if gaps_ms else {},
    }


def minus(told: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: value - other[name] for name, value in told.items() if name in other}


Serves = Callable[[Sequence[str]], str]


@contextmanager
def serve_proxy() -> Iterator[Serves | None]:
    """Gives what puts a Ray Serve application in front of servers, and returns its address; None without Ray Serve."""
    if not all(importlib.util.find_spec(name) for name in ("ray", "starlette")):  # of ray.serve it would import Ray
        say("no arm of Ray Serve: ray[serve] is not installed")
        yield None
        return
    from benchmarks.cluster import serve_app

    with serve_app.serving(free_port(), say) as serves:
        yield serves


def arms_of(cluster: RunningCluster, replicas: int, serves: Serves | None) -> dict[str, list[str]]:
    say(f"starting {replicas} replicas")
    cluster.until(lambda: len(cluster.of_phase("serving")) == replicas, 300)
    urls = [one["url"] for one in cluster.status()["replicas"]]
    arms = {"direct": urls, "gateway": [cluster.url]}
    return arms if serves is None else {**arms, "ray_serve": [serves(urls)]}


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with serve_proxy() as serves:
        for replicas in args.replicas:
            scale = f"[scale]\nmin_replicas = {replicas}\nmax_replicas = {replicas}\nspare = 0\n"
            text = f'runner = "{args.runner}"\n{REPLICA}{scale}'
            with tempfile.TemporaryDirectory() as folder, cluster_of(Path(folder), text) as cluster:
                arms = arms_of(cluster, replicas, serves)
                for streams in (1, 2) if args.small else STREAMS:
                    requests = 2 * streams if args.small else max(100, 4 * streams)
                    say(f"{streams} streams, twice {requests} requests by each of {', '.join(arms)}")
                    yield {"replicas": replicas, **measure(arms, streams, requests)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", choices=("local", "ray"), default="local")
    parser.add_argument("--replicas", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    with ends_within(LIMIT_S):
        for row in measured(args):
            rows.append(row)
            say(summary(row))
    settings = {"tokens": TOKENS, "runner": args.runner, "small": args.small}
    file_result(f"cluster_ways_in_{args.runner}", {"rows": rows}, settings, args.json)
    return int(any(row["gateway"]["complete"] < row["gateway"]["requests"] for row in rows))


def summary(row: dict[str, Any]) -> str:
    kinds = [(what, p) for what in ("added_ttft_ms", "added_itl_ms") for p in ("p50", "p99")]
    added = {
        name: [round(row[what][name].get(p, float("nan")), 1) for what, p in kinds]
        for name in row["added_ttft_ms"]
        if name != "direct"
    }
    return (
        f"{row['replicas']} replicas, {row['streams']} streams, ms beyond direct (TTFT p50, p99, ITL p50, p99): {added}"
    )


if __name__ == "__main__":
    sys.exit(main())
