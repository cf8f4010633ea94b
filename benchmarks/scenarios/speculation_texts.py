"""Texts to guess in: prompts, each with the answer that is replayed behind it (`scenarios.speculation`).

    code         the middle of a module of Python's library; the prompt is what stands before
    prose        likewise of this project's documents
    extraction   the answer quotes lines of the prompt, with a few words of its own between them
    agent        calls of tools, as JSON, alike but for their arguments; others of the same kind were answered before
    random       tokens drawn evenly from the vocabulary

`own` is what the model says itself after the prompts of `code`, greedy: on random weights it means nothing.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from splittime.text.tokenizer import Tokenizer

MODULES = ("argparse", "ast", "asyncio.base_events", "configparser", "csv", "datetime", "difflib", "email.message")
ROOT = Path(__file__).parents[2]


class Lengths(NamedTuple):
    prompt: int
    answer: int


class Ask(NamedTuple):
    """answer: what is replayed; () for what the model says itself."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def code(tokenizer: Tokenizer, count: int, lengths: Lengths) -> list[Ask]:
    files = [Path(__import__(name, fromlist=["_"]).__file__ or "") for name in MODULES]
    return list(_of_texts(tokenizer, [path.read_text("utf-8") for path in files], count, lengths))


def prose(tokenizer: Tokenizer, count: int, lengths: Lengths) -> list[Ask]:
    pages = [ROOT / "BENCHMARKS.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return list(_of_texts(tokenizer, [path.read_text("utf-8") for path in pages], count, lengths))


def _of_texts(tokenizer: Tokenizer, texts: Sequence[str], count: int, lengths: Lengths) -> Iterator[Ask]:
    """Pieces from the middle of these texts, in turn, none twice."""
    wanted = lengths.prompt + lengths.answer
    ids = [encoded(tokenizer, text) for text in texts]
    places = [(number, begin) for number, some in enumerate(ids) for begin in range(0, len(some) - wanted, wanted)]
    random.Random(0).shuffle(places)
    if count > len(places):
        raise SystemExit(f"{count} pieces are asked for, and the texts have {len(places)}: fewer requests or repeats")
    for number, begin in places[:count]:
        piece = tuple(ids[number][begin : begin + wanted])
        yield Ask(piece[: lengths.prompt], piece[lengths.prompt :])


def extraction(tokenizer: Tokenizer, count: int, lengths: Lengths) -> list[Ask]:
    """A quarter of the prompt's tokens at a time, the order of the quarters drawn."""
    rng, asks = random.Random(1), []
    for ask in prose(tokenizer, count, lengths):
        size, answer = lengths.prompt // 4, list[int]()
        while len(answer) < lengths.answer:
            begin = rng.randrange(0, lengths.prompt - size + 1, 8)
            answer += [*encoded(tokenizer, f"\n{len(answer)}. says: "), *ask.prompt[begin : begin + size]]
        asks.append(Ask(ask.prompt, tuple(answer[: lengths.answer])))
    return asks


def agent(tokenizer: Tokenizer, count: int, lengths: Lengths) -> list[Ask]:
    rng, asks = random.Random(2), []
    words = ("invoice", "customer", "shipment", "warehouse", "refund", "contract", "ticket", "region")
    for _ in range(count):
        prompt = encoded(tokenizer, f"Look up {rng.choice(words)} {rng.randrange(10**6)}. " * 40)[: lengths.prompt]
        answer: list[int] = []
        while len(answer) < lengths.answer:
            call = {
                "tool": "search_records",
                "arguments": {
                    "table": rng.choice(words),
                    "id": rng.randrange(10**6),
                    "limit": rng.choice((10, 20, 50)),
                },
            }
            answer += encoded(tokenizer, json.dumps(call, indent=2) + "\n")
        asks.append(Ask(tuple(prompt), tuple(answer[: lengths.answer])))
    return asks


def drawn(tokenizer: Tokenizer, count: int, lengths: Lengths) -> list[Ask]:
    rng, ids = random.Random(3), range(10, 1000)
    return [
        Ask(tuple(rng.choices(ids, k=lengths.prompt)), tuple(rng.choices(ids, k=lengths.answer))) for _ in range(count)
    ]


def own(tokenizer: Tokenizer, count: int, lengths: Lengths) -> list[Ask]:
    return [ask._replace(answer=()) for ask in code(tokenizer, count, lengths)]


KINDS = {"extraction": extraction, "code": code, "prose": prose, "agent": agent, "random": drawn, "own": own}
