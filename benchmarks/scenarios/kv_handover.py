"""What it gains to fetch a prompt's blocks from another server instead of computing them: three `splittime serve`.

    python -m benchmarks.scenarios.kv_handover                                      the model in the package
    python -m benchmarks.scenarios.kv_handover --model FOLDER --prompt-tokens 1000
    python -m benchmarks.scenarios.kv_handover --small

One gives its blocks, one has it as its peer, one has no peer. Each round has a prompt of its own: the first computes
it, then the others answer it, in turns. Told are the medians of the time to the first token (of answers of one token,
by the client's clock) where the prompt is cached, fetched and computed, with their extremes; how many tokens were
fetched; and the causes in the account of the one that fetches. The answers of the three must be equal.

All three share this host's cores and its memory, so there is nothing to be gained here but the prompt's arithmetic;
what a network adds is not in it. It takes at most `LIMIT_S`, then it fails; and ends with 1 where answers differ.
"""

import argparse
import json
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cluster.running import ends_within, say
from benchmarks.report import file_result
from benchmarks.server_process import served

LIMIT_S = 900.0
ARMS = ("cached", "fetched", "computed")
CAUSES = ("kv_export", "kv_transfer", "kv_import")


def get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=300) as response:
        return json.load(response)


class Answerer:
    def __init__(self, url: str) -> None:
        self._url, self._model = url, get(f"{url}/v1/models")["data"][0]["id"]

    def answer(self, prompt: list[int], max_tokens: int = 1) -> tuple[float, dict[str, Any]]:
        """Returns how long it took in ms, and the answer."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/v1/completions", data, {"Content-Type": "application/json"})
        begin = time.monotonic()
        with urllib.request.urlopen(request, timeout=300) as response:
            answer = json.load(response)
        return (time.monotonic() - begin) * 1e3, answer

    def causes_ms(self, answer: dict[str, Any]) -> dict[str, float]:
        """Of the three waits for blocks, from its closed account."""
        stages = get(f"{self._url}/ledger/requests/{answer['id']}")["stages"]
        spent = dict.fromkeys(CAUSES, 0.0)
        for each in stages:
            if each.get("cause") in spent:
                spent[each["cause"]] += (each["end_ns"] - each["begin_ns"]) / 1e6
        return spent


def measure(options: argparse.Namespace) -> dict[str, Any]:
    arguments = [*([options.model] if options.model else []), "--max-model-len", str(options.prompt_tokens + 64)]
    with ExitStack() as servers:
        giver = servers.enter_context(served(*arguments, "--kv-export", timeout_s=300))
        taker = servers.enter_context(served(*arguments, "--kv-peers", giver, timeout_s=300))
        alone = servers.enter_context(served(*arguments, timeout_s=300))
        return compare(Answerer(giver), Answerer(taker), Answerer(alone), options)


def compare(giver: Answerer, taker: Answerer, alone: Answerer, options: argparse.Namespace) -> dict[str, Any]:
    drawn = random.Random(0)
    found: dict[str, Any] = {arm: [] for arm in ARMS} | {cause: [] for cause in CAUSES}
    found |= {"fetched_tokens": [], "unequal": 0}
    for number in range(options.rounds):
        say(f"round {number + 1} of {options.rounds}")
        prompt = [drawn.randrange(5, 500) for _ in range(options.prompt_tokens)]
        giver.answer(prompt)
        told = {arm: server.answer(prompt) for arm, server in zip(ARMS, (giver, taker, alone), strict=True)}
        for arm, (ms, _) in told.items():
            found[arm].append(ms)
        found["fetched_tokens"].append(told["fetched"][1]["usage"]["prompt_tokens_details"]["cached_tokens"])
        for cause, ms in taker.causes_ms(told["fetched"][1]).items():
            found[cause].append(ms)
        texts = [server.answer(prompt, options.answer_tokens)[1]["choices"][0]["text"] for server in (taker, alone)]
        found["unequal"] += texts[0] != texts[1]
    return found


def table(found: dict[str, Any]) -> Table:
    shown = Table("", "median", "least", "most", title=f"answers that differ: {found['unequal']}")
    for name in (*ARMS, *CAUSES, "fetched_tokens"):
        values: Sequence[float] = found[name]
        unit = "" if name == "fetched_tokens" else ", ms"
        shown.add_row(name + unit, *(f"{of(values):.1f}" for of in (statistics.median, min, max)))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; default: the model in the package")
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="two rounds, to see that it runs")
    parser.add_argument("--name", default="kv_handover", help="of the file of results")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.small:
        options.rounds, options.prompt_tokens = 2, 400
    with ends_within(LIMIT_S):
        found = measure(options)
    path = file_result(options.name, found, vars(options), options.json)
    if not options.json:
        Console().print(table(found))
        Console().print(f"written to {path}")
    return int(found["unequal"] > 0)


if __name__ == "__main__":
    sys.exit(main())
