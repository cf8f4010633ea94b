"""The edges of the server under load: first byte out, refusal, cancellation, start-up. Over HTTP, on one machine.

    python -m benchmarks.scenarios.http_edges [--small] [--flags="--num-threads 1"] [--json]

* send lag: 64 streams decode at once; from the instant a token is ready in the engine to the instant its chunk has been
  given to the socket, p50 and p99 over all tokens (from the ledger's accounts).
* refusal: 16 streams decode, the queue is full; 400 requests one after another, then 400 more at 200 a second: time to
  the 429 as the client sees it, and as the server's account says (client, server and engine share two cores).
* cancellation: clients go away at random moments; from noticing it to the blocks being free, p50 and maximum.
* start-up: process start to /ready, three times in a row.

How many threads a server takes is measured by itself, and an engine on all cores delays its server's chunks: two trees
are compared with the number given (`--flags`).
"""

import argparse
import asyncio
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from benchmarks.report import file_result
from benchmarks.server_process import free_port, get_json, served, wait_until_ready
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.store import open_readonly

PROMPT = "def read_json(path):\n"


class Sizes(NamedTuple):
    """streams, tokens: of each. asks: refused, each way. leavers: clients that go away. starts: of a server."""

    streams: int = 64
    tokens: int = 400
    asks: int = 400
    leavers: int = 500
    starts: int = 3


SMALL = Sizes(streams=4, tokens=20, asks=10, leavers=20, starts=1)


async def read_stream(session: aiohttp.ClientSession, url: str, max_tokens: int, leave_after_s: float = 1e9) -> int:
    """Stream a completion; close the connection after `leave_after_s`. Returns the HTTP status."""
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    try:
        async with asyncio.timeout(leave_after_s), session.post(f"{url}/v1/completions", json=body) as response:
            await response.read()
            return response.status
    except TimeoutError:
        return 0


async def many_streams(url: str, count: int, max_tokens: int) -> list[int]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*(read_stream(session, url, max_tokens) for _ in range(count)))


async def leave_at_random(url: str, count: int) -> None:
    rng = random.Random(1)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        for _ in range(0, count, 20):
            await asyncio.gather(*(read_stream(session, url, 400, rng.uniform(0, 0.4)) for _ in range(20)))


async def refusals(url: str, count: int, per_s: float) -> tuple[list[float], list[float]]:
    """Fill 16 slots and a queue of 8, then ask: `count` times one after another, then as often at `per_s` a second,
    whatever became of the others. Milliseconds to each 429."""

    async def ask(session: aiohttp.ClientSession, wait_s: float = 0.0) -> float | None:
        await asyncio.sleep(wait_s)
        begin = time.monotonic()
        async with session.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}) as response:
            await response.read()
            return (time.monotonic() - begin) * 1e3 if response.status == 429 else None

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        fill = []
        for burst in (8, 8, 8):  # each takes its slots before the next comes; the last stays in the queue
            fill += [asyncio.create_task(read_stream(session, url, 1900)) for _ in range(burst)]
            await asyncio.sleep(0.5)
        one_by_one = [await ask(session) for _ in range(count)]
        at_rate = await asyncio.gather(*(ask(session, i / per_s) for i in range(count)))
        for task in fill:
            task.cancel()
        await asyncio.gather(*fill, return_exceptions=True)
    return [ms for ms in one_by_one if ms is not None], [ms for ms in at_rate if ms is not None]


def startup_seconds(count: int, flags: Sequence[str]) -> list[float]:
    seconds = []
    for _ in range(count):
        port = free_port()
        begin = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "splittime.cli.main", "serve", "--port", str(port), *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until_ready(f"http://127.0.0.1:{port}", process, 60)
        seconds.append(time.monotonic() - begin)
        process.terminate()
        process.wait(30)
    return seconds


def accounts_of(ledger_file: Path) -> list[ClosedAccount]:
    accounts = open_readonly(ledger_file).accounts(limit=10**9)
    for account in accounts:
        account.verify()
    return accounts


def measure_streams(folder: Path, sizes: Sizes, flags: Sequence[str]) -> dict[str, Any]:
    ledger_file = folder / "streams.sqlite"
    with served("--ledger-file", str(ledger_file), *flags) as url:
        asyncio.run(many_streams(url, 8, sizes.tokens // 8))
        begin = time.monotonic()
        statuses = asyncio.run(many_streams(url, sizes.streams, sizes.tokens))
        wall_s = time.monotonic() - begin
    assert statuses == [200] * sizes.streams, statuses
    accounts = [account for account in accounts_of(ledger_file) if account.output_tokens == sizes.tokens]
    lags_ms = [lag / 1e6 for account in accounts for lag in derive.send_lag_ns(account)]
    rate = sizes.streams * sizes.tokens / wall_s
    return {"streams": sizes.streams, "tokens_per_s": rate, "send_lag_ms": derive.percentiles(lags_ms)}


def measure_refusals(folder: Path, sizes: Sizes, flags: Sequence[str]) -> dict[str, Any]:
    ledger_file = folder / "refusals.sqlite"
    full = ("--max-queued-requests", "8", "--max-num-seqs", "16")
    with served("--ledger-file", str(ledger_file), *full, *flags) as url:
        one_by_one, at_rate = asyncio.run(refusals(url, sizes.asks, per_s=200))
    refused = [a for a in accounts_of(ledger_file) if a.error is not None and a.error.status == 429]
    server_ms = [derive.e2e_ns(account) / 1e6 for account in refused]
    return {
        "one_by_one": {"refused": len(one_by_one), "client_ms": derive.percentiles(one_by_one)},
        "200_per_s": {"refused": len(at_rate), "client_ms": derive.percentiles(at_rate)},
        "server_account_ms": derive.percentiles(server_ms) | {"max": max(server_ms)},
        "server_share_under_5_ms": sum(ms < 5 for ms in server_ms) / len(server_ms),
    }


def measure_cancellation(folder: Path, sizes: Sizes, flags: Sequence[str]) -> dict[str, Any]:
    ledger_file = folder / "cancel.sqlite"
    with served("--ledger-file", str(ledger_file), *flags) as url:
        asyncio.run(leave_at_random(url, sizes.leavers))
        time.sleep(0.5)
        blocks_used = get_json(f"{url}/stats")["engine"]["blocks_used"]
        steps = get_json(f"{url}/ledger/steps?limit=2000")
    steps = steps.get("steps", steps) if isinstance(steps, dict) else steps
    freed = [ns / 1e6 for a in accounts_of(ledger_file) if (ns := derive.cancel_to_freed_ns(a)) is not None]
    longest_step_ms = max(step["end_ns"] - step["begin_ns"] for step in steps) / 1e6
    return {
        "cancelled": len(freed),
        "blocks_used_after": blocks_used,
        "cancel_to_freed_ms": derive.percentiles(freed) | {"max": max(freed)},
        "longest_step_ms": longest_step_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="to see that it works: the figures mean nothing")
    parser.add_argument("--flags", default="", help='of each `serve`: --flags="--num-threads 1"')
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes, flags = SMALL if arguments.small else Sizes(), shlex.split(arguments.flags)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        starts = startup_seconds(sizes.starts, flags)
        figures = {
            "startup_s": {"median": statistics.median(starts), "all": starts},
            "streams": measure_streams(folder, sizes, flags),
            "refusals": measure_refusals(folder, sizes, flags),
            "cancellation": measure_cancellation(folder, sizes, flags),
        }
    path = file_result("http_edges", figures, vars(arguments), arguments.json)
    if not arguments.json:
        for key, value in figures.items():
            print(f"{key}: {value}")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
