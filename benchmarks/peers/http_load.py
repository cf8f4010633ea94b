"""Many clients over HTTP against each engine's server: tokens/s, TTFT, TPOT and the longest stall.

    python -m benchmarks.peers.http_load --folder PEERS --model llama-1b --precision int8 --clients 16 32 --repeats 3

Closed loop: each client sends its requests one after another, streamed, all clients start at once. Prompts are token
ids. Lengths are drawn with a seed from log-normals fitted to 20,487 ShareGPT turns (Llama 2 tokens, at most 8,141 in
and 1,024 out; the means and standard deviations of the logarithms are in `PROMPT` and `OUTPUT`), cut at those maxima
and scaled down, prompts by 32 and outputs by 16, to what a small machine can do in minutes. Every server gets the same
requests; the servers stay up and take turns, another first in each repeat. The clients share the machine's cores with
the server.

TTFT: from sending to the first chunk that carries a token. TPOT: the rest of the time over the rest of the tokens.
Stall: the longest gap between two chunks of one request. Percentiles are of one run's requests; what is shown is the
median of the runs with its quartiles, and of three figures the ratio of ours to the peer that is best in it, the median
of the runs' own ratios. Results: benchmarks/results/peers_http_MODEL_PRECISION_PROCESSOR.json.
"""

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from rich.console import Console

from benchmarks.peers.ceilings import Prober, scratch
from benchmarks.peers.contenders import CLASSES, OURS, without_folders
from benchmarks.peers.run import bars, locked, setting, spread
from benchmarks.peers.servers import ServerEntry, server_entries, serving
from benchmarks.peers.show import COMPARED, http_table, notes, wide
from benchmarks.report import conditions, file_result, processor
from benchmarks.server_process import free_port

PROMPT = {"mu": 7.01, "sigma": 1.62, "max": 8141, "scale": 32}
OUTPUT = {"mu": 5.76, "sigma": 0.99, "max": 1024, "scale": 16}
MIN_TOKENS = 4
USAGE = {"stream_options": {"include_usage": True}}
TROUBLE = (RuntimeError, OSError, aiohttp.ClientError, TimeoutError)
BEST: tuple[Callable[..., str], ...] = (max, min, min)  # of COMPARED
Result = TypeVar("Result")
Runs = dict[str, dict[int, dict[str, float]]]  # figures by server and repeat
RUN_S = 900.0  # a run that takes longer has failed: its server hangs


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    new_tokens: int


@dataclass
class Seen:
    """One answer as its client saw it; instants in seconds of the monotonic clock, one for each chunk of tokens."""

    new_tokens: int
    sent: float
    chunks: list[float]
    usage: int | None = None

    @property
    def ttft_s(self) -> float:
        return self.chunks[0] - self.sent

    @property
    def tpot_s(self) -> float:
        return (self.chunks[-1] - self.chunks[0]) / (self.new_tokens - 1)

    @property
    def stall_s(self) -> float:
        return max((b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)), default=0.0)


def draw(count: int, seed: int) -> list[Ask]:
    rng = random.Random(seed)
    lengths = [(_length(rng, PROMPT), _length(rng, OUTPUT)) for _ in range(count)]
    return [Ask([rng.randrange(5, 30_000) for _ in range(prompt)], output) for prompt, output in lengths]


def _length(rng: random.Random, fit: dict[str, float]) -> int:
    drawn = min(fit["max"], math.exp(rng.gauss(fit["mu"], fit["sigma"])))
    return max(MIN_TOKENS, round(drawn / fit["scale"]))


async def ask(session: aiohttp.ClientSession, entry: ServerEntry, one: Ask) -> Seen:
    body = {"prompt": one.prompt, "max_tokens": one.new_tokens, "stream": True, **USAGE, **entry.body}
    seen = Seen(one.new_tokens, time.monotonic(), [])
    async with session.post(f"{entry.url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{entry.name}: {response.status} {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            now, event = time.monotonic(), json.loads(line[6:])
            if event.get("usage"):
                seen.usage = event["usage"]["completion_tokens"]
            if event.get("choices") and event["choices"][0].get("text"):
                seen.chunks.append(now)
    if seen.usage != one.new_tokens or not seen.chunks:
        raise RuntimeError(f"{entry.name}: asked for {one.new_tokens} tokens, got {seen.usage}")
    return seen


def new_session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=RUN_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a server may close an idle connection as we write
    return aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 20)


async def load(entry: ServerEntry, clients: list[list[Ask]]) -> tuple[float, list[Seen]]:
    """Seconds in all, and every answer."""

    async def client(asks: list[Ask]) -> list[Seen]:
        return [await ask(session, entry, one) for one in asks]

    async with new_session() as session:
        begin = time.monotonic()
        answers = await asyncio.gather(*(client(asks) for asks in clients))
        return time.monotonic() - begin, [seen for one in answers for seen in one]


def figures_of(wall_s: float, answers: list[Seen]) -> dict[str, float]:
    ttft_ms, tpot_ms = ([getattr(one, name) * 1e3 for one in answers] for name in ("ttft_s", "tpot_s"))
    return {
        "output_tokens_per_s": sum(one.new_tokens for one in answers) / wall_s,
        "ttft_p50_ms": _percentile(ttft_ms, 0.5),
        "ttft_p99_ms": _percentile(ttft_ms, 0.99),
        "tpot_p50_ms": _percentile(tpot_ms, 0.5),
        "tpot_p99_ms": _percentile(tpot_ms, 0.99),
        "max_stall_ms": max(one.stall_s for one in answers) * 1e3,
        "wall_s": wall_s,
    }


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def compare(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    folder = arguments.folder.resolve()
    found = server_entries(folder, arguments.model, arguments.precision, arguments.threads, dict(arguments.setting))
    found = [entry for entry in found if not arguments.only or entry.name.split()[0] in arguments.only]
    about: dict[str, Any] = {}
    runs: dict[str, Runs] = {str(count): {} for count in arguments.clients}
    with scratch() as logs, ExitStack() as stack:
        up = brought_up(found, arguments.threads, Path(logs), stack, about)
        prober = stack.enter_context(Prober(arguments.threads, Path(logs)))
        limits = [prober.probe()]
        progress = stack.enter_context(bars(console))
        bar = progress.add_task("", total=arguments.repeats * len(arguments.clients) * len(up))
        for number in range(arguments.repeats):
            for count in arguments.clients:
                asks = draw(count * arguments.requests, seed=1000 * number + count)
                clients = [asks[i::count] for i in range(count)]
                for entry in up[number % len(up) :] + up[: number % len(up)]:
                    progress.update(bar, description=f"{count} clients, {entry.name}")
                    with locked(arguments.lock):
                        run = attempted(_run(entry, clients), about[entry.name])
                    if run is not None:
                        runs[str(count)].setdefault(entry.name, {})[number] = run
                    progress.advance(bar)
            limits.append(prober.probe())
    cells = {count: {name: _summary(one) for name, one in by_name.items()} for count, by_name in runs.items()}
    ratios = {count: ours_over_best(by_name) for count, by_name in runs.items()}
    kept = {"model": arguments.model, "precision": arguments.precision}
    return {**kept, "clients": cells, "ours_over_best_peer": ratios, "servers": about, "limits": limits}


def ours_over_best(runs: Runs) -> dict[str, Any]:
    """By figure: the peer whose median is best in it, and the spread of the ratios of the runs that both have."""
    found: dict[str, Any] = {}
    for key, best in zip(COMPARED, BEST, strict=True):
        medians = {name: spread([run[key] for run in of.values()])["median"] for name, of in runs.items()}
        peers = [name for name in medians if name != OURS]
        if OURS not in runs or not peers:
            continue
        peer = best(peers, key=medians.__getitem__)
        both = [number for number in runs[OURS] if number in runs[peer]]
        if both:
            found[key] = {"best_peer": peer, **spread([runs[OURS][n][key] / runs[peer][n][key] for n in both])}
    return found


async def _run(entry: ServerEntry, clients: list[list[Ask]]) -> dict[str, float]:
    return figures_of(*await load(entry, clients))


def attempted(work: Coroutine[Any, Any, Result], about: dict[str, Any]) -> Result | None:
    """Returns what the work returns; None if it failed, which goes into what is told about its server."""
    try:
        return asyncio.run(work)
    except TROUBLE as error:
        about.setdefault("failed_runs", []).append(without_folders(_words(error))[:300])
        return None


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def brought_up(
    found: list[ServerEntry], threads: int, logs: Path, stack: ExitStack, about: dict[str, Any]
) -> list[ServerEntry]:
    """Returns the servers that came up, as they run; they end with the stack. What came of each goes into `about`.
    Raises SystemExit if none did."""
    tried = [_brought_up(entry, threads, logs, stack, about) for entry in found]
    up = [entry for entry in tried if entry is not None]
    if not up:
        raise SystemExit(f"no server came up: {about}")
    return up


def _brought_up(
    entry: ServerEntry, threads: int, logs: Path, stack: ExitStack, about: dict[str, Any]
) -> ServerEntry | None:
    """Starts the server and warms it by a request, if need be the other way. Its port is chosen only now: one that was
    free a minute ago may be another's, as servers that start slowly go before."""
    if entry.absent is not None:
        about[entry.name] = {"absent": entry.absent}
        return None
    troubles: dict[str, str] = {}
    for words, command in entry.ways:
        started, trial = replace(entry, command=command, port=free_port()), ExitStack()
        try:
            log = logs / f"{entry.name.replace(' ', '-')}.log"
            ready_s = trial.enter_context(serving(started, threads, log))
            asyncio.run(load(started, [[Ask(list(range(5, 37)), 8)]] * 2))
        except TROUBLE as error:
            trial.close()
            troubles[words] = without_folders(_words(error))
            continue
        stack.push(trial)
        about[entry.name] = {"ready_s": ready_s} | ({"runs": words, "because": troubles} if troubles else {})
        return started
    about[entry.name] = {"absent": "; ".join(f"{way}: {why}" for way, why in troubles.items())}
    return None


def _summary(runs: dict[int, dict[str, float]]) -> dict[str, Any]:
    keys = next(iter(runs.values()))
    return {key: spread([run[key] for run in runs.values()]) for key in keys}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="the peers' folder; see contenders.py")
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--precision", choices=CLASSES, default="int8")
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="servers by their first word")
    parser.add_argument("--setting", nargs="+", type=setting, default=[], metavar="NAME=VALUE", help="of our server")
    parser.add_argument("--lock", type=Path, help="held through each run; see run.py")
    parser.add_argument("--no-file", action="store_true", help="print only")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = compare(arguments, Console(stderr=True))
    if not arguments.no_file:
        settings = {**vars(arguments), "setting": dict(arguments.setting), "prompt_fit": PROMPT, "output_fit": OUTPUT}
        name = f"peers_http_{arguments.model}_{arguments.precision}_{processor(conditions())}"
        file_result(name, figures, settings, arguments.json)
    elif arguments.json:
        print(json.dumps(figures))
    if not arguments.json:
        console = wide()
        console.print(http_table(figures))
        for note in notes(figures["servers"]):
            console.print(note, markup=False)


if __name__ == "__main__":
    main()
