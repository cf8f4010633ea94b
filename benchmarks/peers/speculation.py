"""Tokens/s with speculation over without, in several engines' servers, on the two models that ship in this package.

    python -m benchmarks.peers.speculation --folder PEERS --repeats 5
    python -m benchmarks.peers.speculation --folder PEERS --sizes 1 --kinds code --only splittime llama.cpp --json

Who takes part: our server, llama.cpp's and vLLM's, each without drafts and once more with each of `methods`: drafts
from the text alone, and from the smaller model. Whoever is not there, or refuses its method, is left out with its own
words. Weights are bfloat16 everywhere, the packaged models' own and in llama.cpp faster than float16 or float32; its KV
cache is float16, its default. The packaged models are copied and converted into PEERS/models and PEERS/gguf.

Answers are the engine's own, greedy, and go on behind an end of text: only our runner can be made to replay a written
answer, as `benchmarks.scenarios.speculation` does. A model of four million parameters repeats itself, so its text is
easier to guess than people's, and a step of it takes less time than a server's own work: the ratios compare engines on
this pair and say nothing of larger models. Prompts are token ids, the same for all, and other ones in each round, as
some methods remember answers:

    code         the middle of a module of Python's library
    extraction   this project's documents, and behind them an answer that has begun to quote them line by line

In a turn a server gets `PROMPTS` prompts, so many at once, first for one token of each and then for the whole answers.
Tokens/s are those after the first over the difference of the two times, which leaves out prefill and what a request
costs before its first token. A round is everyone's turn at one cell, another first in each; one round goes before,
uncounted. Figures are medians of the rounds with their quartiles, ratios those of the rounds' own ratios to the same
engine without drafts.

right: drafts that were kept, of those that the server says it verified. other text: answers that are not what the same
engine wrote without drafts. With several requests at once this may also happen where sums depend on the batch. as ours:
answers without drafts that are what our engine wrote, as a check that all run the same model; rounding tells them apart
sooner or later.
"""

import argparse
import asyncio
import filecmp
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.peers.ceilings import scratch
from benchmarks.peers.contenders import CLASSES, OURS, without_folders
from benchmarks.peers.convert import to_gguf
from benchmarks.peers.http_load import attempted, brought_up, new_session
from benchmarks.peers.run import SETTLE_S, bars, locked, spread
from benchmarks.peers.servers import CONTEXT_TOKENS, ServerEntry, server_entries
from benchmarks.peers.show import notes, wide
from benchmarks.report import conditions, file_result, processor
from benchmarks.scenarios.speculation_texts import KINDS, Lengths
from splittime.assemble import model_source
from splittime.text.tokenizer import Tokenizer
from splittime.wire.dialects import parse, values

MODEL, DRAFT = "code", "code-draft"
PRECISION = "bf16"
PROMPTS = 4  # of a turn
MOST_DRAFTS = 64  # that a method below puts behind a text: the context must hold them
WITH = " + "  # between an engine's name and its method's
COUNTERS = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
TIMINGS = ("draft_n", "draft_n_accepted")  # in llama.cpp's answers
Turns = dict[str, dict[int, "Turn"]]  # by server and round


class Cell(NamedTuple):
    kind: str
    size: int  # requests at once

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.size}"


class Turn(NamedTuple):
    """What came of one server's turn. drafts, right: how many it verified and kept."""

    tokens_per_s: float
    texts: list[str]
    drafts: float
    right: float


# ---- who takes part


def methods(folder: Path, kind: str, drafts: int) -> dict[str, dict[str, list[str]]]:
    """Returns the flags of each method, by engine and the method's name in that engine.

    Ours chooses in each step how many drafts to verify, up to 16. vLLM must be told a number: for n-grams that of its
    documents, and 2 tokens at least must match, as with ours. llama.cpp: its defaults, but for `ngram-simple`, whose
    12 tokens rarely stand twice in a short text. drafts: how many the smaller model makes in the peers.
    """
    draft, converted = str(folder / "models" / DRAFT), str(folder / "gguf" / f"{DRAFT}-{kind}.gguf")
    short = ["--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8"]
    return {
        OURS: {
            "ngram": configured(method="ngram"),
            "suffix": configured(method="suffix"),
            "draft_model": configured(method="draft_model", model=DRAFT),
        },
        "llama.cpp": {
            "ngram-cache": ["--spec-type", "ngram-cache"],
            "ngram-simple": ["--spec-type", "ngram-simple", *short],
            "ngram-mod": ["--spec-default"],
            "draft-simple": ["--spec-type", "draft-simple", "--spec-draft-n-max", str(drafts), "-md", converted],
        },
        "vllm": {
            "ngram": configured(method="ngram", num_speculative_tokens=5, prompt_lookup_max=4, prompt_lookup_min=2),
            "suffix": configured(method="suffix"),
            "draft_model": configured(method="draft_model", model=draft, num_speculative_tokens=drafts),
        },
    }


def configured(**fields: Any) -> list[str]:
    """Returns the flag, whose name ours has from vLLM."""
    return ["--speculative-config", json.dumps(fields)]


def entries(folder: Path, threads: int, drafts: int) -> list[ServerEntry]:
    """Returns each engine without drafts, and behind it the same engine with each method."""
    found = []
    flags = methods(folder, CLASSES[PRECISION]["gguf"][0], drafts)
    for entry in server_entries(folder, MODEL, PRECISION, threads, {}):
        its = flags.get(entry.name.split()[0])
        if its is not None:
            found += [entry, *(with_method(entry, method, more) for method, more in its.items())]
    lacks_arctic = not any((folder / "venv" / "vllm").glob("lib/python*/site-packages/arctic_inference"))
    for entry in found:
        if lacks_arctic and entry.name.startswith("vllm") and entry.name.endswith(f"{WITH}suffix"):
            entry.why_not = "vLLM's suffix decoding needs arctic-inference, which is not installed beside it"
    return found


def with_method(entry: ServerEntry, method: str, flags: list[str]) -> ServerEntry:
    other = None if entry.otherwise is None else (entry.otherwise[0], [*entry.otherwise[1], *flags])
    return replace(entry, name=f"{entry.name}{WITH}{method}", command=[*entry.command, *flags], otherwise=other)


def without_drafts(name: str) -> str:
    """Returns the name of the same engine's entry that has no drafts."""
    return name.partition(WITH)[0]


def prepare(folder: Path) -> None:
    """Copies both models into the folder and converts them, unless that was done with the same weights."""
    for name in (MODEL, DRAFT):
        source, target = model_source.locate(name), folder / "models" / name
        weights = target / "model.safetensors"
        if not weights.exists() or not filecmp.cmp(source / weights.name, weights, shallow=False):
            shutil.copytree(source, target, dirs_exist_ok=True)
            for stale in (folder / "gguf").glob(f"{name}-*.gguf"):
                stale.unlink()
        try:
            to_gguf(folder, name, CLASSES[PRECISION]["gguf"][0])
        except (OSError, RuntimeError) as error:
            print(f"{name} is not converted for llama.cpp: {error}", file=sys.stderr)


def prompts(kind: str, count: int, tokens: int) -> list[list[int]]:
    """Returns [count][tokens] token ids, no text twice."""
    tokenizer = Tokenizer.load(model_source.locate(MODEL))
    begun = tokens // 4 if kind == "extraction" else 0
    asks = KINDS[kind](tokenizer, count, Lengths(tokens - begun, max(1, begun)))
    return [[*ask.prompt, *ask.answer[:begun]] for ask in asks]


# ---- turns


async def take_turn(entry: ServerEntry, asked: list[list[int]], size: int, tokens: int) -> Turn:
    """Raises RuntimeError where a request fails, or the answers took no longer than their first tokens."""
    async with new_session() as session:
        before = await counted(session, entry)
        await timed(session, entry, asked[:size], size, 1)  # wakes what sleeps
        first_s, _ = await timed(session, entry, asked, size, 1)
        all_s, answers = await timed(session, entry, asked, size, tokens)
        await asyncio.sleep(SETTLE_S)  # which is also time for the counters
        after = await counted(session, entry)
    if all_s <= first_s:
        raise RuntimeError(f"{entry.name}: {tokens} tokens took {all_s:.4f} s, the first {first_s:.4f} s")
    in_answers = [sum(one.get("timings", {}).get(name, 0) for one in answers) for name in TIMINGS]
    drafts, right = (last - old + more for last, old, more in zip(after, before, in_answers, strict=True))
    rate = len(asked) * (tokens - 1) / (all_s - first_s)
    return Turn(rate, [one["choices"][0]["text"] for one in answers], drafts, right)


async def counted(session: aiohttp.ClientSession, entry: ServerEntry) -> list[float]:
    """Returns the server's `COUNTERS`, 0 each where it has no metrics."""
    async with session.get(f"{entry.url}/metrics") as response:
        samples = parse(await response.text(), COUNTERS)
    return [sum(values(samples, name)) for name in COUNTERS]


async def timed(
    session: aiohttp.ClientSession, entry: ServerEntry, asked: list[list[int]], size: int, tokens: int
) -> tuple[float, list[dict[str, Any]]]:
    """Returns the seconds that all answers took, `size` of them at once, and the answers."""
    begin, answers = time.perf_counter(), list[dict[str, Any]]()
    for at in range(0, len(asked), size):
        group = asked[at : at + size]
        answers += await asyncio.gather(*(answered(session, entry, prompt, tokens) for prompt in group))
    return time.perf_counter() - begin, answers


async def answered(session: aiohttp.ClientSession, entry: ServerEntry, prompt: list[int], tokens: int) -> Any:
    """Returns an answer's body. No answer is streamed: a client that reads each token takes time from the server."""
    body = {"prompt": prompt, "max_tokens": tokens, **entry.body}
    async with session.post(f"{entry.url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{entry.name}: {response.status} {(await response.text())[:300]}")
        found = await response.json()
    if found["usage"]["completion_tokens"] != tokens:
        raise RuntimeError(f"{entry.name}: asked for {tokens} tokens, got {found['usage']['completion_tokens']}")
    return found


# ---- all of it


def compare(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    folder, rounds = arguments.folder.resolve(), arguments.repeats + 1
    cells = [Cell(kind, size) for kind in arguments.kinds for size in arguments.sizes]
    prepare(folder)
    found = entries(folder, arguments.threads, arguments.drafts)
    found = [entry for entry in found if not arguments.only or entry.name.split()[0] in arguments.only]
    about: dict[str, Any] = {}
    turns: dict[Cell, Turns] = {cell: {entry.name: {} for entry in found} for cell in cells}
    with scratch() as logs, ExitStack() as stack:
        up = brought_up(found, arguments.threads, Path(logs), stack, about)
        progress = stack.enter_context(bars(console))
        bar = progress.add_task("", total=rounds * len(cells) * len(up))
        asked = drawn(cells, rounds, arguments.prompt)
        for number, cell, entry in order(rounds, cells, up):
            progress.update(bar, description=f"{cell.name}, {entry.name}")
            with locked(arguments.lock):
                work = take_turn(entry, asked[cell][number], cell.size, arguments.answer)
                turn = attempted(work, about[entry.name])
            if turn is not None and number:
                turns[cell][entry.name][number] = turn
            progress.advance(bar)
    commands = {entry.name: without_folders(" ".join(entry.command)) for entry in found}
    return {"cells": {cell.name: summary(of) for cell, of in turns.items()}, "servers": about, "commands": commands}


def order(rounds: int, cells: list[Cell], up: list[ServerEntry]) -> Iterator[tuple[int, Cell, ServerEntry]]:
    """Yields every turn: round, cell and server. An engine and its methods stand beside each other."""
    for number in range(rounds):
        for cell in cells:
            first = number % len(up)
            yield from ((number, cell, entry) for entry in up[first:] + up[:first])


def drawn(cells: list[Cell], rounds: int, tokens: int) -> dict[Cell, list[list[list[int]]]]:
    """Returns [rounds][prompts][tokens] of each cell, no text twice in a kind."""
    found: dict[Cell, list[list[list[int]]]] = {}
    for kind in dict.fromkeys(cell.kind for cell in cells):
        its = [cell for cell in cells if cell.kind == kind]
        counts = [max(PROMPTS, cell.size) for cell in its]
        left = iter(prompts(kind, rounds * sum(counts), tokens))
        for cell, count in zip(its, counts, strict=True):
            found[cell] = [[next(left) for _ in range(count)] for _ in range(rounds)]
    return found


def summary(turns: Turns) -> dict[str, Any]:
    """Returns one cell's figures by server."""
    found: dict[str, Any] = {}
    turns = {name: its for name, its in turns.items() if its}
    for name, its in turns.items():
        found[name] = {"tokens_per_s": spread([turn.tokens_per_s for turn in its.values()])}
        plain = turns.get(without_drafts(name), {})
        if plain is not its:
            found[name] |= over(its, plain)
        elif OURS in turns and name != OURS:
            found[name]["as_ours"] = _alike(its, turns[OURS])
    return found


def over(turns: dict[int, Turn], plain: dict[int, Turn]) -> dict[str, Any]:
    """Returns what drafts changed, from the rounds that both had."""
    both = [number for number in turns if number in plain]
    ratios = [turns[number].tokens_per_s / plain[number].tokens_per_s for number in both]
    drafts, right = (sum(getattr(turn, name) for turn in turns.values()) for name in ("drafts", "right"))
    alike = _alike(turns, plain)
    return {
        "over_without": spread(ratios) if ratios else None,
        "drafts": drafts,
        "right": right,
        "other_text": {"answers": alike["answers"], "count": alike["answers"] - alike["count"]},
    }


def _alike(turns: dict[int, Turn], others: dict[int, Turn]) -> dict[str, int]:
    """Returns how many answers there are in the rounds that both had, and how many are the same text."""
    pairs = [pair for n, turn in turns.items() if n in others for pair in zip(turn.texts, others[n].texts, strict=True)]
    return {"answers": len(pairs), "count": sum(a == b for a, b in pairs)}


def table(cells: dict[str, Any]) -> Table:
    shown = Table(title=f"{MODEL} with drafts, {PRECISION}: medians (quartiles)")
    for column in ("cell", "server", "tokens/s", "over without", "drafts right", "other text", "as ours"):
        shown.add_column(column, justify="left" if column in ("cell", "server") else "right")
    for cell, by_name in cells.items():
        for name, one in by_name.items():
            shown.add_row(cell, name, _spread(one["tokens_per_s"], ",.0f"), *_drafted(one), _share(one.get("as_ours")))
        shown.add_section()
    return shown


def _drafted(one: dict[str, Any]) -> tuple[str, str, str]:
    if "drafts" not in one:
        return "", "", ""
    right = f"{one['right'] / one['drafts']:.0%} of {one['drafts']:,.0f}" if one["drafts"] else "none"
    ratio = _spread(one["over_without"], ".2f") if one["over_without"] else "-"
    return ratio, right, _share(one["other_text"])


def _spread(one: dict[str, Any], form: str) -> str:
    return f"{one['median']:{form}} ({one['p25']:{form}}-{one['p75']:{form}})"


def _share(one: dict[str, int] | None) -> str:
    return "" if one is None else f"{one['count']} of {one['answers']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="the peers' folder; see contenders.py")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4], help="requests at once")
    parser.add_argument("--kinds", nargs="+", choices=("code", "extraction"), default=["code", "extraction"])
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--answer", type=int, default=160, help="tokens")
    parser.add_argument("--drafts", type=int, default=3, help="of the smaller model at once, in the peers")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="engines by their first word")
    parser.add_argument("--lock", type=Path, help="held through each turn; see run.py")
    parser.add_argument("--small", action="store_true", help="to see that it works: the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.small:
        arguments.sizes, arguments.prompt, arguments.answer, arguments.repeats = [1, 2], 64, 32, 1
    if arguments.prompt + arguments.answer + MOST_DRAFTS > CONTEXT_TOKENS:
        room = CONTEXT_TOKENS - MOST_DRAFTS
        parser.error(f"--prompt {arguments.prompt} and --answer {arguments.answer} must not be above {room} together")
    before = conditions()
    figures = {**compare(arguments, Console(stderr=True)), "load_1min_before": before["load_1min"]}
    path = file_result(f"peers_speculation_{processor(before)}", figures, vars(arguments), arguments.json)
    if not arguments.json:
        console = wide()
        console.print(table(figures["cells"]))
        for note in notes(figures["servers"]):
            console.print(note, markup=False)
        console.print(f"written to {path}", markup=False)


if __name__ == "__main__":
    main()
