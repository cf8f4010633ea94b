"""What the gateway adds to a request: through it against direct, at 1, 8 and 64 streams.

    python -m benchmarks.gateway.overhead [--json]
    python -m benchmarks.gateway.overhead --small        a trial: few requests, no figures to be quoted

The upstream is the mock server with declared timings (`splittime bench mock-server`: 20 ms to the first token, 5 ms
between tokens), in a process of its own; the gateway is `splittime gateway` in another; the load is `bench`'s, a closed
loop of so many streams of 32 tokens in a third. Direct and through the gateway take turns (direct, gateway, gateway,
direct), so that a slow drift of the machine cancels. In each figure:

* ttft_ms: from the last byte given to the socket to the first chunk read, by the client's clock; added: the difference
  of the two arms' percentiles
* tokens_per_s: of all streams, over the time of the run
* cpu_ms_per_1000_tokens: processor time of the gateway's process

All processes share the machine's cores, the mock server's own work included, which the same load pays direct too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import file_result
from splittime.bench.book.records import Ending, Outcome
from splittime.bench.book.requests import service_ttft_ns
from splittime.bench.event_loop import run_loop
from splittime.bench.mock_answer import MODEL
from splittime.bench.run import run_schedule
from splittime.bench.schedule import Planned, Schedule
from splittime.ledger.derive import percentiles
from splittime.wire.target import RunOptions, Target

TTFT, ITL, TOKENS = "20ms", "5ms", 32
STREAMS = (1, 8, 64)
MS = 1_000_000
PROMPT = tuple(range(16))


@contextmanager
def started(key: str, *arguments: str) -> Iterator[tuple[str, int]]:
    """Yields the URL that one of our commands says that it listens on, and its process id."""
    command = [sys.executable, "-m", "splittime.cli.main", *arguments, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())[key], process.pid
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def gateway(upstream: str) -> Iterator[tuple[str, int]]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "gateway.toml"
        config.write_text(
            f'port = 0\n[[upstream]]\nname = "mock"\nurl = "{upstream}"\nmodels = ["{MODEL}"]\nmax_in_flight = 256\n'
        )
        with started("gateway", "gateway", "--config", str(config)) as served:
            yield served


def cpu_s(pid: int) -> float:
    """Processor time that a process has taken, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(url: str, streams: int, rounds: int) -> tuple[list[Outcome], float]:
    """Returns what became of each request, and the seconds from the first sent to the last end."""
    requests = tuple(Planned(index=i, at_ns=None, output_tokens=TOKENS, prompt=PROMPT) for i in range(streams * rounds))
    target = Target(url=url, model=MODEL)
    schedule = Schedule(seed=0, requests=requests, concurrency=streams)
    outcomes = list(run_loop(run_schedule(schedule, [target], RunOptions(workers=1))).outcomes)
    ends = [outcome.end_ns or 0 for outcome in outcomes]
    return outcomes, (max(ends) - min(outcome.sent_ns or 0 for outcome in outcomes)) / 1e9


def measure(direct: str, through: str, pid: int, streams: int, rounds: int) -> dict[str, Any]:
    outcomes: dict[str, list[Outcome]] = {"direct": [], "gateway": []}
    seconds, cpu = dict.fromkeys(outcomes, 0.0), 0.0
    for url in (direct, through):  # connections are opened, code is warm
        load(url, streams, 1)
    for arm in ("direct", "gateway", "gateway", "direct"):
        before_s = cpu_s(pid)
        found, lasted_s = load(direct if arm == "direct" else through, streams, rounds)
        cpu += cpu_s(pid) - before_s
        outcomes[arm] += found
        seconds[arm] += lasted_s
    figures: dict[str, Any] = {arm: figures_of(found, seconds[arm]) for arm, found in outcomes.items()}
    added = {name: figures["gateway"]["ttft_ms"][name] - value for name, value in figures["direct"]["ttft_ms"].items()}
    tokens = figures["gateway"]["complete"] * TOKENS
    return {"streams": streams, **figures, "added_ttft_ms": added, "cpu_ms_per_1000_tokens": cpu * 1e6 / tokens}


def figures_of(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    whole = [one for one in outcomes if one.ending is Ending.COMPLETE and len(one.chunk_ns) == TOKENS]
    ttft_ms = [ns / MS for one in whole if (ns := service_ttft_ns(one)) is not None]
    return {
        "requests": len(outcomes),
        "complete": len(whole),
        "ttft_ms": percentiles(ttft_ms, (50, 99)),
        "tokens_per_s": len(whole) * TOKENS / seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    requests = 64 if args.small else 1200
    mock = ("bench", "mock-server", "--port", "0", "--ttft", TTFT, "--itl", ITL)
    with started("url", *mock) as (direct, _), gateway(direct) as (through, pid):
        rows = [
            measure(direct, through, pid, streams, max(2, (requests if streams > 1 else requests // 8) // streams))
            for streams in STREAMS
        ]
    settings = {"ttft": TTFT, "itl": ITL, "tokens": TOKENS, "small": args.small}
    file_result("gateway_overhead", {"rows": rows}, settings, args.json)
    for row in rows:
        added, arms = row["added_ttft_ms"], (row["direct"], row["gateway"])
        print(
            f"{row['streams']:>3} streams: TTFT +{added['p50']:.2f} ms p50, +{added['p99']:.2f} ms p99; "
            f"{arms[0]['tokens_per_s']:.0f} tokens/s direct, {arms[1]['tokens_per_s']:.0f} through it; "
            f"{row['cpu_ms_per_1000_tokens']:.0f} ms of processor for 1,000 tokens",
            file=sys.stderr,
        )
    return int(any(row[arm]["complete"] < row[arm]["requests"] for row in rows for arm in ("direct", "gateway")))


if __name__ == "__main__":
    sys.exit(main())
