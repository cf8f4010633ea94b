"""The books of a vLLM beside a client that is nobody's: two thousand requests with everything that can happen to one.

    python -m benchmarks.scenarios.vllm_books --vllm FOLDER [--requests 2000] [--concurrency 24] [--json]

FOLDER is the environment that vLLM and splittime are installed in. Slots and KV blocks are short, so that requests
queue and are preempted. An eighth of the clients hang up, an eighth ask for two answers, a quarter of the prompts begin
alike, half of the answers are streamed. The client keeps its own clocks. Then every account must sum, every step and
gap too, nothing may be unattributed, and the tokens of each account must lie in the steps that it names.

residual: the client's TTFT and E2E less the account's, for requests with one answer that were served. It holds the way
there and back and the client's own event loop.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from benchmarks.report import file_result
from benchmarks.server_process import served_vllm
from splittime.assemble import model_source
from splittime.ledger.account import ClosedAccount
from splittime.ledger.derive import percentiles, stage_ns, ttft_ns
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord, verify_steps
from splittime.ledger.store import open_readonly

TEXT = "def read_json(path):\n    return json.load(open(path))\n"
LIMITS = ("--max-num-seqs", "8", "--max-model-len", "512", "--num-gpu-blocks-override", "34", "--block-size", "32")
PATIENCE_S = 30.0


class Felt(NamedTuple):
    """What a client felt: from sending to the first chunk and to the end, in ns; None: it hung up, or was refused."""

    name: str
    ttft_ns: int | None
    e2e_ns: int | None
    num_answers: int


async def ask(session: aiohttp.ClientSession, model: str, number: int, rng: random.Random) -> Felt:
    name, begins_alike = f"books-{number}", rng.random() < 0.25
    hangs_up, two = rng.random() < 1 / 8, rng.random() < 1 / 8
    body = {
        "model": model,
        "prompt": (TEXT * 4 if begins_alike else f"x{number} = ") + TEXT * rng.randrange(1, 5),
        "max_tokens": rng.randrange(1, 120),
        "ignore_eos": True,
        "temperature": 1.0,
        "n": 2 if two else 1,
        "stream": hangs_up or rng.random() < 0.5,
    }
    leaves_s = rng.random() * 0.5 if hangs_up else None
    begin_ns, first_ns = time.monotonic_ns(), None
    async with session.post("/v1/completions", json=body, headers={"X-Request-Id": name}) as response:
        async for _ in response.content.iter_any():
            first_ns = first_ns or time.monotonic_ns()
            if leaves_s is not None and time.monotonic_ns() - begin_ns > leaves_s * 1e9:
                return Felt(name, None, None, body["n"])
        response.raise_for_status()
    return Felt(name, None if first_ns is None else first_ns - begin_ns, time.monotonic_ns() - begin_ns, body["n"])


async def crowd(url: str, model: str, count: int, concurrency: int) -> list[Felt]:
    rng, places = random.Random(7), asyncio.Semaphore(concurrency)
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int, own: random.Random) -> Felt:
            async with places:
                return await ask(session, model, number, own)

        return await asyncio.gather(*(one(number, random.Random(rng.random())) for number in range(count)))


def books_of(path: Path, least: int) -> tuple[list[ClosedAccount], list[StepRecord]]:
    """Returns what the file holds once it has so many accounts, or patience ends."""
    until = time.monotonic() + PATIENCE_S
    while True:
        file = open_readonly(path)
        accounts, steps = list(file.accounts(limit=10**6)), list(file.steps(limit=10**6))
        file.close()
        if len(accounts) >= least or time.monotonic() > until:
            return accounts, steps
        time.sleep(0.5)


def faults_of(accounts: list[ClosedAccount], steps: list[StepRecord]) -> list[str]:
    """Returns what is wrong with the books, a sentence each."""
    faults, in_step = [], {step.step_id: {name for name, _, _ in step.rows} for step in steps}
    try:
        verify_steps(steps)
    except ValueError as error:
        faults.append(str(error))
    for account in accounts:
        try:
            account.verify()
        except ValueError as error:
            faults.append(f"{account.request_id}: {error}")
        if stage_ns(account).get(Stage.UNATTRIBUTED):
            faults.append(f"{account.request_id} has time that nobody explains")
        if any(account.request_id not in in_step.get(step_id, ()) for step_id in account.token_steps):
            faults.append(f"{account.request_id} has a token of a step that it was not in")
    twice = [name for name, count in Counter(account.request_id for account in accounts).items() if count > 1]
    return faults + [f"{name} has two accounts" for name in twice]


def residuals(felt: list[Felt], accounts: list[ClosedAccount]) -> dict[str, Any]:
    """Returns the client's figures less the account's, by figure."""
    by_group = {account.group_id: account for account in accounts}
    found: dict[str, list[float]] = {"ttft_ms": [], "e2e_ms": []}
    for each in felt:
        account = by_group.get(f"cmpl-{each.name}")
        if account is None or each.e2e_ns is None or each.ttft_ns is None or each.num_answers > 1:
            continue
        found["e2e_ms"].append((each.e2e_ns - (account.end_ns - account.start_ns)) / 1e6)
        found["ttft_ms"].append((each.ttft_ns - (ttft_ns(account) or 0)) / 1e6)
    return {
        name: {
            "requests": len(values),
            "mean": statistics.mean(values),
            "percentiles": percentiles(values),
            "least": min(values),
        }
        for name, values in found.items()
    }


def figures_of(felt: list[Felt], accounts: list[ClosedAccount], steps: list[StepRecord]) -> dict[str, Any]:
    waits: Counter[str] = Counter()
    for account in accounts:
        for interval in account.intervals:
            if interval.stage in (Stage.QUEUE, Stage.PREEMPTED):
                waits[f"{interval.stage.value}: {interval.cause.value if interval.cause else None}"] += 1
    return {
        "requests": len(felt),
        "answers": sum(each.num_answers for each in felt),
        "accounts": len(accounts),
        "left": sum(account.cancelled_ns is not None for account in accounts),
        "preemptions": sum(account.num_preemptions for account in accounts),
        "cached_tokens": sum(account.cached_tokens for account in accounts),
        "steps": len(steps),
        "waits": dict(waits),
        "faults": faults_of(accounts, steps),
        "residuals": residuals(felt, accounts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the environment of vLLM and splittime")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    model = str(model_source.locate(None))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.sqlite"
        with served_vllm(arguments.vllm, model, *LIMITS, ledger_file=str(path)) as url:
            felt = asyncio.run(crowd(url, model, arguments.requests, arguments.concurrency))
            accounts, steps = books_of(path, sum(each.num_answers for each in felt))
    told = figures_of(felt, accounts, steps)
    written = file_result("vllm_books", told, vars(arguments), arguments.json)
    if not arguments.json:
        for name, value in told.items():
            print(f"{name}: {value}")
        print(f"written to {written}")


if __name__ == "__main__":
    main()
