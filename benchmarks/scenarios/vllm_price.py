"""What our books cost a vLLM server: tokens/s and TTFT with them over without, in one server, by turns.

    python -m benchmarks.scenarios.vllm_price --vllm FOLDER [--model MODEL] [--pairs 24] [--requests 96] [--json]

FOLDER is the environment that vLLM and splittime are installed in. Two servers of the same settings differ by up to
five percent on two cores, so there is one, whose books are switched off and on between two loads (`vllm_switch`; what
is left while they are off is a look at a file for each request and a test for each wrapped method). A pair is a load
with the books and the same load without, in an order that changes: a closed loop of 16 measures what a step costs
(tokens a second), requests one by one measure TTFT. Told are the geometric mean of the pairs' ratios, with over
without, and its interval of 95 % (Student's t on their logarithms). Goal: within 1 %.

The CPU time that vLLM's processes took for each token, from the system, is beside it: wall time on a shared machine
moves by more than the books cost.
"""

import argparse
import asyncio
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from benchmarks.cpu_seconds import cpu_seconds_of_children
from benchmarks.report import file_result
from benchmarks.scenarios.both_books import VOCAB_SIZE
from benchmarks.server_process import served_vllm
from splittime.assemble import model_source
from splittime.stats.intervals import t_quantile

PROMPT_TOKENS, OUTPUT_TOKENS, AT_ONCE = (16, 400), (16, 64), 16
ALONE_TOKENS = (200, 4)
SETTLE_S = 0.2  # until the mail of what went before is read
SWITCH, MODULE = "SPLITTIME_BENCHMARK_OFF", "benchmarks.vllm_switch"  # `OFF` of a module that only vLLM can import


class Asked(NamedTuple):
    prompt: list[int]
    output_tokens: int


async def answered(session: aiohttp.ClientSession, url: str, asked: Asked) -> int:
    """Returns the time to the first token, in ns."""
    body = {"prompt": asked.prompt, "max_tokens": asked.output_tokens, "stream": True, "ignore_eos": True}
    begin_ns, first_ns = time.monotonic_ns(), None
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b'data: {"error"'):
                raise RuntimeError(line.decode())
            if first_ns is None and line.startswith(b"data: "):
                first_ns = time.monotonic_ns() - begin_ns
    assert first_ns is not None
    return first_ns


async def asked_all(url: str, asked: Sequence[Asked], at_once: int) -> list[int]:
    """Returns what `answered` says of each; so many are on their way at any time. A client of `bench` would have the
    server send its ledger, which is no part of the price."""
    left, found = iter(asked), list[int]()

    async def one_after_the_other(session: aiohttp.ClientSession) -> None:
        for each in left:
            found.append(await answered(session, url, each))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(one_after_the_other(session) for _ in range(at_once)))
    return found


def crowd(url: str, requests: int, rng: random.Random) -> dict[str, float]:
    """Returns tokens a second of a closed loop, and CPU milliseconds a token."""
    lengths = random.Random(requests)  # the same ones each time; other tokens, or the prefix cache knows them
    asked = [
        Asked(some_tokens(rng, lengths.randint(*PROMPT_TOKENS)), lengths.randint(*OUTPUT_TOKENS))
        for _ in range(requests)
    ]
    tokens, before_s, begin_s = sum(each.output_tokens for each in asked), cpu_seconds_of_children(), time.monotonic()
    asyncio.run(asked_all(url, asked, AT_ONCE))
    return {
        "tokens_per_s": tokens / (time.monotonic() - begin_s),
        "cpu_ms_per_token": (cpu_seconds_of_children() - before_s) * 1e3 / tokens,
    }


def alone(url: str, requests: int, rng: random.Random) -> dict[str, float]:
    """Returns the median TTFT of requests one by one, in ms."""
    asked = [Asked(some_tokens(rng, ALONE_TOKENS[0]), ALONE_TOKENS[1]) for _ in range(requests)]
    return {"ttft_ms": statistics.median(asyncio.run(asked_all(url, asked, 1))) / 1e6}


def some_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


def compared(url: str, switch: Path, pairs: int, requests: int) -> list[dict[str, dict[str, float]]]:
    """Returns the figures of each pair, by arm. switch: the file whose being there switches the books off."""
    found: list[dict[str, dict[str, float]]] = [{} for _ in range(pairs)]
    rng = random.Random(0)
    for number in range(pairs):
        for arm in ("with", "without") if number % 2 else ("without", "with"):
            time.sleep(SETTLE_S)
            switch.unlink(missing_ok=True) if arm == "with" else switch.touch()
            found[number][arm] = crowd(url, requests, rng) | alone(url, requests // 4, rng)
    return found


def ratios(pairs: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Returns with over without, by figure."""
    told = {}
    for name in pairs[0]["with"]:
        logs = [math.log(each["with"][name] / each["without"][name]) for each in pairs]
        middle, reach = statistics.mean(logs), 0.0
        if len(logs) > 1:
            reach = t_quantile(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        told[name] = {"ratio": math.exp(middle), "low": math.exp(middle - reach), "high": math.exp(middle + reach)}
    return told


def measured(environment: str, model: str, pairs: int, requests: int) -> list[dict[str, dict[str, float]]]:
    """Starts the server and returns the figures of each pair."""
    settings = ("--max-num-seqs", "16", "--max-model-len", "2048")
    books = ("--scheduler-cls", f"{MODULE}.scheduler", "--middleware", f"{MODULE}.WithSwitch")
    paths = (str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        switch = Path(folder) / "off"
        os.environ |= {SWITCH: str(switch), "PYTHONPATH": os.pathsep.join(paths)}
        with served_vllm(environment, model, *settings, *books, with_books=False) as url:
            crowd(url, requests, random.Random(1))
            return compared(url, switch, pairs, requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the environment of vLLM and splittime")
    parser.add_argument("--model", help="its folder; default: the packaged one")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    model = arguments.model or str(model_source.locate(None))
    pairs = measured(arguments.vllm, model, arguments.pairs, arguments.requests)
    told: dict[str, Any] = {"ratios": ratios(pairs), "pairs": pairs}
    path = file_result("vllm_price", told, vars(arguments), arguments.json)
    if not arguments.json:
        for name, found in told["ratios"].items():
            print(f"{name:<18} with / without: {found['ratio']:.4f} ({found['low']:.4f} to {found['high']:.4f})")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
