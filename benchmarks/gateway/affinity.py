"""What prefix affinity gives to chats of several turns at two servers: what their caches hold, and TTFT.

    python -m benchmarks.gateway.affinity [--chats N] [--turns N] [--rounds N] [--json]
    python -m benchmarks.gateway.affinity --small        a trial: few turns, no figures to be quoted

Two of our own servers serve the packaged model, each in processes of its own; a gateway with `[affinity]` and one
without stand in front of both. The arms take turns (without, with, with, without), with other chats each time, so that
a slow drift of the machine cancels and no arm finds the other's prompts. The chats of an arm run at the same time: all
begin with one system prompt; each asks, reads its answer, pauses for a random moment, and asks again with all that was
said before.

* cached: of the prompt tokens of second turns and later, those that the server had (`usage` says so)
* ttft_ms: of the same turns, from sending to the first chunk with a text, by the client's clock
* at_home: of the same turns, those that went where the turn before was
* most: the part of all requests that the busier server had
* decided: what affinity decided, by its account

All processes share the machine's cores: without a cached prefix there is more work, and everybody waits for it.
"""

import argparse
import http.client
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gateway.overhead import started
from benchmarks.report import file_result
from benchmarks.server_process import get_json, served
from splittime.ledger.derive import percentiles

MODEL = "splittime-code"
ANSWER_TOKENS = 16
MOST_PAUSE_S = 0.1
WORDS = ("list", "queue", "stack", "tree", "graph", "file", "parse", "sort", "merge", "count", "find", "read", "write")
SYSTEM = "You write short functions in Python, with types and without comments. " * 8
ARMS = {"load": "", "affinity": "[affinity]\n"}


class Turn(NamedTuple):
    """One request as its client had it. number: of the turn in its chat, from 0 on."""

    chat: str
    number: int
    upstream: str
    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    text: str


@contextmanager
def gateway(servers: Sequence[str], arm: str) -> Iterator[str]:
    told = "port = 0\n" + ARMS[arm]
    for number, url in enumerate(servers):
        told += f'[[upstream]]\nname = "ours{number}"\nurl = "{url}"\nmodels = ["{MODEL}"]\nkind = "splittime"\n'
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "gateway.toml"
        config.write_text(told)
        with started("gateway", "gateway", "--config", str(config)) as (url, _):
            yield url


def ask(url: str, chat: str, number: int, messages: list[dict[str, str]]) -> Turn:
    """Returns a turn when its stream has ended."""
    body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    begin_ns = time.monotonic_ns()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text, first_ns, usage = "", 0, dict[str, Any]()
    for line in answer:
        data = line.removeprefix(b"data: ").strip()
        if not data or data == b"[DONE]":
            continue
        chunk = json.loads(data)
        usage = chunk.get("usage") or usage
        said = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        first_ns = first_ns or (time.monotonic_ns() if said else 0)
        text += said
    connection.close()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    upstream, ttft_ms = answer.headers["x-splittime-upstream"], (first_ns - begin_ns) / 1e6
    return Turn(chat, number, upstream, ttft_ms, usage["prompt_tokens"], cached, text)


def talk(url: str, chat: str, turns: int) -> list[Turn]:
    """Returns the turns of one chat, each with all that was said before."""
    draw, messages, had = random.Random(chat), [{"role": "system", "content": SYSTEM}], list[Turn]()
    for number in range(turns):
        time.sleep(draw.uniform(0, MOST_PAUSE_S))
        asked = f"{chat}: " + " ".join(draw.choices(WORDS, k=40))
        messages.append({"role": "user", "content": asked})
        had.append(ask(url, chat, number, messages))
        messages.append({"role": "assistant", "content": had[-1].text})
    return had


def one_run(url: str, name: str, chats: int, turns: int) -> list[Turn]:
    with ThreadPoolExecutor(chats) as threads:
        running = [threads.submit(talk, url, f"{name} {number}", turns) for number in range(chats)]
        return [turn for one in running for turn in one.result()]


def summary(turns: Sequence[Turn], decided: dict[str, int]) -> dict[str, Any]:
    """Returns the figures of one arm."""
    later = [turn for turn in turns if turn.number]
    before = {(turn.chat, turn.number + 1): turn.upstream for turn in turns}
    by_upstream = Counter(turn.upstream for turn in turns)
    return {
        "requests": len(turns),
        "cached": sum(turn.cached_tokens for turn in later) / sum(turn.prompt_tokens for turn in later),
        "ttft_ms": percentiles([turn.ttft_ms for turn in later], (50, 90, 99)),
        "at_home": sum(before[turn.chat, turn.number] == turn.upstream for turn in later) / len(later),
        "most": max(by_upstream.values()) / len(turns),
        "decided": decided,
    }


def measure(chats: int, turns: int, rounds: int) -> dict[str, Any]:
    had: dict[str, list[Turn]] = {arm: [] for arm in ARMS}
    with served() as one, served() as two, gateway((one, two), "load") as load, gateway((one, two), "affinity") as by:
        urls = {"load": load, "affinity": by}
        for url in urls.values():
            one_run(url, "warm-up", chats, 1)
        for number in range(rounds):
            for place, arm in enumerate(("load", "affinity", "affinity", "load")):
                had[arm] += one_run(urls[arm], f"chat {number} {place} {arm}", chats, turns)
        decided = {arm: get_json(f"{url}/stats")["affinity"] for arm, url in urls.items()}
    return {arm: summary(had[arm], decided[arm]) for arm in ARMS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=8, help="at the same time")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2, help="of four runs each")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    chats, turns, rounds = (3, 3, 1) if args.small else (args.chats, args.turns, args.rounds)
    figures = measure(chats, turns, rounds)
    settings = {"chats": chats, "turns": turns, "rounds": rounds, "small": args.small, "model": MODEL}
    file_result("gateway_affinity", figures, settings, args.json)
    for arm, found in figures.items():
        ttft = found["ttft_ms"]
        print(
            f"{arm:>8}: {found['cached']:.1%} of later turns' prompt tokens cached, {found['at_home']:.1%} at home; "
            f"TTFT {ttft['p50']:.0f} ms p50, {ttft['p99']:.0f} p99; the busier server had {found['most']:.0%}",
            file=sys.stderr,
        )
    return int(any(found["requests"] != chats * turns * rounds * 2 for found in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
