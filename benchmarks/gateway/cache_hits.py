"""How often the semantic cache hits, and how often it should not have: with its lexical gate, and without.

    python -m benchmarks.gateway.cache_hits [--data FOLDER] [--json]
    python -m benchmarks.gateway.cache_hits --embeddings http://127.0.0.1:8080 --model NAME    another embedder

FOLDER has `cache_paraphrases.json` (three questions with five rewordings each) and `banking77_pairs.csv.gz` (pairs of
customers' questions, with whether both are of one intent). Where it is not there, this says so and ends.

A pair is a hit if the cache would give one question's answer to the other: cosine at least the threshold, and through
the gate. Of each set some pairs should be hits and some should not:

* paraphrases: a question and its rewordings; questions and rewordings of another
* banking77: one intent, or two. One intent is weaker than one answer, so hits among these are counted as right that
  need not be
* changed: made of banking77's questions by a few changes that are fixed here: rewritten without another meaning (case,
  punctuation, politeness), or with one (a negation, an opposite, another number, name or direction)

hit_rate: of the pairs that should be hits. false_hits: hits that should not be; false_hit_rate: of all hits, with
Wilson's interval; of_unlike: of the pairs that should not be. The gate is tested alone by threshold 0.0.
"""

import argparse
import csv
import gzip
import json
import re
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.report import file_result
from splittime.gateway.cache.embedders import unit
from splittime.gateway.cache.gate import agrees, features
from splittime.gateway.cache.ngrams import Vector, embedded
from splittime.gateway.cache.shadow import wilson

PARAPHRASES, PAIRS = "cache_paraphrases.json", "banking77_pairs.csv.gz"
DATA = Path(__file__).parents[3] / "shared" / "data" / "eval"
THRESHOLDS = (0.97, 0.95, 0.9, 0.8, 0.0)
DEFAULT = 0.97
SETS = ("paraphrases", "banking77", "changed")
MAX_CHANGED = 1500  # texts
BATCH = 64
OPPOSITES = (
    ("before", "after"), ("activate", "deactivate"), ("send", "receive"), ("increase", "lower"), ("add", "remove"),
    ("deposit", "withdrawal"), ("cancel", "confirm"), ("open", "close"), ("virtual", "physical"), ("first", "second"),
    ("lost", "found"), ("cash", "cheque"), ("transfer", "refund"), ("accepted", "declined"), ("why", "when"),
)  # fmt: skip
NAMES = (
    ("US", "UK"),
    ("EU", "US"),
    ("USD", "GBP"),
    ("Visa", "Mastercard"),
    ("Apple Pay", "Google Pay"),
    ("ATM", "app"),
)
NAMES += (("euros", "dollars"), ("pounds", "dollars"), ("Europe", "Asia"), ("today", "yesterday"), ("week", "month"))
NEGATED = (("can", "cannot"), ("is", "is not"), ("was", "was not"), ("has", "has not"), ("do", "do not"))
TURNED = (("from", "to"), ("to", "from"), ("into", "out of"))


class Pair(NamedTuple):
    """should_hit: whether one's answer is the other's."""

    one: str
    other: str
    should_hit: bool


def paraphrases(path: Path) -> list[Pair]:
    cases = json.loads(path.read_text(encoding="utf-8"))
    groups = [[case["original_question"], *case["similar_questions"]] for case in cases]
    alike = [Pair(group[0], other, True) for group in groups for other in group[1:]]
    unlike = [
        Pair(one, other, False)
        for at, group in enumerate(groups)
        for rest in groups[at + 1 :]
        for one in group
        for other in rest
    ]
    return alike + unlike


def banking(path: Path) -> list[Pair]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return [Pair(row["text_a"], row["text_b"], row["same_intent"] == "1") for row in csv.DictReader(file)]


def changed(texts: Iterable[str]) -> list[Pair]:
    """Returns each text beside its rewritings, and beside what asks for something else."""
    pairs = [pair for text in list(dict.fromkeys(texts))[:MAX_CHANGED] for pair in _changes(text)]
    return [pair for pair in pairs if pair.one != pair.other]


def _changes(text: str) -> Iterable[Pair]:
    plain = text.rstrip(" .!?")
    yield from (Pair(text, other, True) for other in (plain, text.lower(), f"Please, {text}", text.replace(" ", "  ")))
    yield Pair(text, re.sub(r"\b(can|does|is|was|do)n't\b", lambda found: _whole(found[1]), text), True)
    yield Pair(text, re.sub(r"\d+", lambda found: str(int(found[0]) + 1), text, count=1), False)
    for swaps in (NEGATED, OPPOSITES, NAMES, TURNED):
        found = next((swap for swap in swaps if re.search(rf"\b{swap[0]}\b", text)), None)
        if found is not None:
            yield Pair(text, re.sub(rf"\b{found[0]}\b", found[1], text, count=1), False)


def _whole(verb: str) -> str:
    return "cannot" if verb == "can" else f"{verb} not"


# ---- vectors


def by_ngrams(texts: Sequence[str]) -> dict[str, Vector]:
    return {text: embedded(text) for text in dict.fromkeys(texts)}


def by_upstream(url: str, model: str) -> Callable[[Sequence[str]], dict[str, Vector]]:
    """Returns what asks an OpenAI-compatible server for the vectors of texts."""

    def asked(texts: Sequence[str]) -> dict[str, Vector]:
        told, vectors = list(dict.fromkeys(texts)), list[Vector]()
        for at in range(0, len(told), BATCH):
            body = json.dumps({"model": model, "input": told[at : at + BATCH], "encoding_format": "float"}).encode()
            request = urllib.request.Request(f"{url}/v1/embeddings", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                vectors += [unit(one["embedding"]) for one in json.load(answer)["data"]]
        return dict(zip(told, vectors, strict=True))

    return asked


# ---- figures


def measured(pairs: Sequence[Pair], vectors: dict[str, Vector]) -> list[dict[str, Any]]:
    """Returns a row for each threshold, with the gate and without."""
    cosines = np.array([float(vectors[pair.one] @ vectors[pair.other]) for pair in pairs])
    should = np.array([pair.should_hit for pair in pairs])
    passes = np.array([agrees(features(pair.one), features(pair.other)) for pair in pairs])
    rows = []
    for threshold in THRESHOLDS:
        near = cosines >= threshold if threshold else np.ones(len(pairs), dtype=bool)
        for gate, hits in (("on", near & passes), ("off", near)):
            if threshold or gate == "on":
                rows.append({"threshold": threshold, "gate": gate, **_figures(hits, should)})
    return rows


def _figures(hits: np.ndarray, should: np.ndarray) -> dict[str, Any]:
    right, false = int((hits & should).sum()), int((hits & ~should).sum())
    alike, unlike = int(should.sum()), int((~should).sum())
    return {
        "alike": alike,
        "unlike": unlike,
        "hits": right + false,
        "hit_rate": right / alike,
        "false_hits": false,
        "false_hit_rate": false / (right + false) if right + false else None,
        "interval_95": wilson(false, right + false),
        "of_unlike": false / unlike,
        "of_unlike_95": wilson(false, unlike),
    }


def show(name: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"{name}: {rows[0]['alike']} pairs that should be hits, {rows[0]['unlike']} that should not")
    print("  threshold  gate     hits  hit rate  false hits  of all hits (95 %)       of unlike pairs")
    for row in rows:
        low, high = row["interval_95"]
        rate = "-" if row["false_hit_rate"] is None else f"{row['false_hit_rate']:.3f} ({low:.3f} to {high:.3f})"
        cells = f"{row['threshold']:11.2f}  {row['gate']:<4}{row['hits']:>9}{row['hit_rate']:>10.4f}"
        print(f"{cells}{row['false_hits']:>12}  {rate:<23}{row['of_unlike']:>10.5f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=DATA, metavar="FOLDER", help="where the evaluation sets are")
    parser.add_argument("--embeddings", metavar="URL", help="a server with /v1/embeddings; default: n-grams")
    parser.add_argument("--model", default="", help="the model that it is asked for")
    parser.add_argument("--pairs", type=int, help="of banking77, the first so many; default: all")
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS, help="which; default: all")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    asked = parser.parse_args()
    missing = [name for name in (PARAPHRASES, PAIRS) if not (asked.data / name).is_file()]
    if missing:
        print(f"skipped: {' and '.join(missing)} not found; --data FOLDER says where they are")
        return
    questions = banking(asked.data / PAIRS)[: asked.pairs]
    sets = {
        "paraphrases": paraphrases(asked.data / PARAPHRASES),
        "banking77": questions,
        "changed": changed(chain.from_iterable((pair.one, pair.other) for pair in questions)),
    }
    vectors_of = by_upstream(asked.embeddings.rstrip("/"), asked.model) if asked.embeddings else by_ngrams
    figures = {}
    for name in asked.sets:
        pairs = sets[name]
        figures[name] = measured(pairs, vectors_of([text for pair in pairs for text in pair[:2]]))
        if not asked.json:
            show(name, figures[name])
    embedder = asked.model if asked.embeddings else "ngrams"
    result = f"cache_hits_{re.sub(r'[^A-Za-z0-9.-]+', '-', embedder)}"
    file_result(result, figures, {"embedder": embedder, "default_threshold": DEFAULT}, asked.json)


if __name__ == "__main__":
    main()
