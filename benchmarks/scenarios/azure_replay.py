"""Replays a real trace against `splittime serve` over HTTP, faster than it can be served, and says where the time went.

    python -m benchmarks.scenarios.azure_replay --trace azure_2023_conv.csv.gz [--seconds 300] [--speedup 4] [--json]

The trace has arrival times and lengths, no text. Lengths are scaled by one factor so that the longest 1 % of requests
fill the model's context (what is longer is cut). Prompts are random token ids; outputs are exactly as long as the trace
says (`ignore_eos`). Open loop: each request is sent at its time, whatever became of the others. Then every account is
read from the ledger's file and verified, and time is added up by stage and cause for each prompt-length bucket.
"""

import argparse
import asyncio
import csv
import gzip
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.report import file_result
from benchmarks.server_process import get_json, served
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.store import open_readonly

LONGEST_SHARE = 0.01


@dataclass
class TraceRequest:
    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass
class Answer:
    """What the client saw. Response time counts from the intended start."""

    status: int
    response_s: float
    lateness_s: float
    output_tokens: int


def load_trace(path: Path, seconds: float, speedup: float, max_model_len: int) -> tuple[list[TraceRequest], float]:
    """The scaled requests and the factor their lengths were multiplied by."""
    with gzip.open(path, "rt") as file:
        rows = [(float(r["arrival_s"]), int(r["input_tokens"]), int(r["output_tokens"])) for r in csv.DictReader(file)]
    rows = [row for row in rows if row[0] < seconds]
    totals = sorted(row[1] + row[2] for row in rows)
    scale = min(1.0, max_model_len / totals[int((1 - LONGEST_SHARE) * (len(totals) - 1))])
    requests = []
    for at_s, num_input, num_output in rows:
        output_tokens = min(max(1, round(num_output * scale)), max_model_len // 2)
        prompt_tokens = min(max(1, round(num_input * scale)), max_model_len - output_tokens - 1)
        requests.append(TraceRequest(at_s / speedup, prompt_tokens, output_tokens))
    return requests, scale


async def send(
    session: aiohttp.ClientSession, url: str, request: TraceRequest, rng: random.Random, begin: float
) -> Answer:
    await asyncio.sleep(max(0.0, begin + request.at_s - time.monotonic()))
    sent = time.monotonic()
    body = {
        "prompt": [rng.randrange(10, 4000) for _ in range(request.prompt_tokens)],
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    output_tokens = 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if b'"usage":{' in line:
                output_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    return Answer(response.status, time.monotonic() - begin - request.at_s, sent - begin - request.at_s, output_tokens)


async def replay(url: str, requests: list[TraceRequest]) -> list[Answer]:
    rng = random.Random(0)
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        begin = time.monotonic()
        return await asyncio.gather(*(send(session, url, request, rng, begin) for request in requests))


def where_time_went(accounts: list[ClosedAccount]) -> dict[str, dict[str, Any]]:
    """For each prompt-length bucket: how many requests, and mean ms a request by stage and cause."""
    buckets: dict[str, list[ClosedAccount]] = defaultdict(list)
    for account in accounts:
        buckets[derive.prompt_bucket(account.prompt_tokens)].append(account)
    buckets["all"] = accounts
    return {name: _bucket_row(members) for name, members in sorted(buckets.items(), key=_by_length)}


def _by_length(item: tuple[str, Any]) -> tuple[bool, int]:
    name = item[0]
    return name == "all", 0 if name == "all" else int(name.split("-")[0].rstrip("+"))


def _bucket_row(accounts: list[ClosedAccount]) -> dict[str, Any]:
    totals: dict[str, int] = defaultdict(int)
    for account in accounts:
        for (stage, cause), duration_ns in derive.stage_totals_ns(account).items():
            totals[f"{stage}({cause})" if cause else str(stage)] += duration_ns
    ttfts = [t / 1e6 for a in accounts if (t := derive.ttft_ns(a)) is not None]
    return {
        "requests": len(accounts),
        "ttft_ms": derive.percentiles(ttfts),
        "e2e_ms": derive.percentiles([derive.e2e_ns(account) / 1e6 for account in accounts]),
        "mean_ms_by_stage": {name: total / 1e6 / len(accounts) for name, total in sorted(totals.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300, help="how much of the trace to replay")
    parser.add_argument("--speedup", type=float, default=4.0, help="arrivals come this many times faster")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ledger_file = Path(folder) / "ledger.sqlite"
        with served("--ledger-file", str(ledger_file), "--max-queued-requests", "100000",
                    "--max-queued-prompt-tokens", "100000000") as url:  # fmt: skip
            max_model_len = get_json(f"{url}/v1/models")["data"][0]["max_model_len"]
            requests, scale = load_trace(arguments.trace, arguments.seconds, arguments.speedup, max_model_len)
            print(f"{len(requests)} requests, lengths times {scale:.3f}", file=sys.stderr)
            begin = time.monotonic()
            answers = asyncio.run(replay(url, requests))
            wall_s = time.monotonic() - begin
            stats = get_json(f"{url}/stats")
        accounts = open_readonly(ledger_file).accounts(limit=10**9)
    for account in accounts:
        account.verify()
    figures = summarise(requests, answers, accounts, wall_s, scale)
    path = file_result("azure_replay", figures | {"stats": stats}, vars(arguments), arguments.json)
    if not arguments.json:
        show(figures)
        print(f"written to {path}")


def summarise(
    requests: list[TraceRequest], answers: list[Answer], accounts: list[ClosedAccount], wall_s: float, scale: float
) -> dict[str, Any]:
    exact = sum(a.output_tokens == r.output_tokens for a, r in zip(answers, requests, strict=True))
    unattributed = sum(i.duration_ns for a in accounts for i in a.intervals if i.stage == "unattributed")
    return {
        "requests": len(requests),
        "answered_200": sum(answer.status == 200 for answer in answers),
        "exact_output_length": exact,
        "accounts": len(accounts),
        "accounts_verified": len(accounts),
        "unattributed_ns": unattributed,
        "length_scale": scale,
        "arrivals_s": requests[-1].at_s,
        "wall_s": wall_s,
        "output_tokens_per_s": sum(answer.output_tokens for answer in answers) / wall_s,
        "client_lateness_ms": derive.percentiles([answer.lateness_s * 1e3 for answer in answers]),
        "response_time_s": derive.percentiles([answer.response_s for answer in answers]),
        "where_time_went": where_time_went(accounts),
    }


def show(figures: dict[str, Any]) -> None:
    for key, value in figures.items():
        if key != "where_time_went":
            print(f"{key}: {value}")
    buckets = figures["where_time_went"]
    stages = sorted({stage for row in buckets.values() for stage in row["mean_ms_by_stage"]})
    print(f"\nmean ms a request{'':14}" + "".join(f"{name:>12}" for name in buckets))
    print(f"{'requests':31}" + "".join(f"{row['requests']:>12}" for row in buckets.values()))
    for stage in stages:
        print(f"{stage:31}" + "".join(f"{row['mean_ms_by_stage'].get(stage, 0.0):>12.2f}" for row in buckets.values()))


if __name__ == "__main__":
    main()
