"""How far does a small budget of text mislead the quality gate? Windows as it draws them, beside documents' beginnings.

    python -m benchmarks.scenarios.quality_windows [--text FILE] [--quantization int4] [--json]

Both forms of the packaged model read all windows of the texts once. Then, of windows that are worth a small budget, the
perplexity ratio: as `quality.documents.plan` draws them, over documents and positions, by ten seeds; and the first
window of each document, which are licences and imports, with the documents in ten orders. Of all the text there is one
ratio: the nearer the ten lie to it, the less the choice of windows misleads; and it should be in the interval that the
gate gives (95 %, bootstrap over documents). Without `--text`: Python's held-out files.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.report import file_result
from benchmarks.scenarios.quality_gate import PACKAGED, load
from splittime.lab.quality.documents import (
    Document,
    TextWindow,
    distinct,
    plan,
    prefix_of,
    python_documents,
    read_documents,
    tokenized,
)
from splittime.lab.quality.local import LocalModel
from splittime.lab.quality.texts import compare
from splittime.stats.paired import BootstrapEstimate, ratio_of_sums

BUDGETS, SEEDS, LENGTH = (1000, 2000, 4000, 8000), range(10), 256
Cost = tuple[float, int]
"""Nats that the candidate needs more, over how many tokens."""


def measure(documents: Sequence[Document], quantization: str) -> dict[str, Any]:
    base, candidate = load("base", PACKAGED), load(quantization, PACKAGED, quantization=quantization)
    texts, prefix = distinct(tokenized(documents, base.tokenizer)), prefix_of(base.tokenizer)
    costs = {window: _cost(base, candidate, window) for window in plan(texts, LENGTH, 0, prefix, sys.maxsize)}
    room = LENGTH - len(prefix)
    begin = {window for window in costs if list(window.token_ids[len(prefix) :]) == texts[window.document].ids[:room]}
    first = sorted(begin, key=lambda window: window.document)
    chosen = {}
    for budget in BUDGETS:
        chosen[f"drawn, {budget}"] = [plan(texts, LENGTH, 0, prefix, budget, seed) for seed in SEEDS]
        chosen[f"first, {budget}"] = [_worth(Random(seed).sample(first, len(first)), budget) for seed in SEEDS]
        chosen[f"first, in order, {budget}"] = [_worth(first, budget)]
    return {
        "documents": len(texts),
        "tokens": sum(count for _, count in costs.values()),
        "all": _ratio(costs, list(costs)).value,
        "all first windows": _ratio(costs, first).value,
        "some": {name: [asdict(_ratio(costs, each)) for each in some] for name, some in chosen.items()},
    }


def _cost(base: LocalModel, candidate: LocalModel, window: TextWindow) -> Cost:
    ids, begin = window.token_ids, window.first - 1
    found = compare(ids, *(model.predictions(ids, begin, 0) for model in (base, candidate)))
    return float((found.candidate_nll - found.base_nll).sum()), len(found.kl)


def _worth(windows: Sequence[TextWindow], budget: int) -> list[TextWindow]:
    """The first of them, until the budget is spent."""
    sums = accumulate((len(window.token_ids) for window in windows), initial=0)
    return [window for window, spent in zip(windows, sums, strict=False) if spent < budget]


def _ratio(costs: Mapping[TextWindow, Cost], windows: Sequence[TextWindow]) -> BootstrapEstimate:
    documents = {window.document for window in windows}
    rows = [[costs[window] for window in windows if window.document == document] for document in documents]
    sums = np.array([[sum(column) for column in zip(*row, strict=True)] for row in rows], dtype=np.float64)
    return ratio_of_sums(sums[:, 0], sums[:, 1]).mapped_by_exp()


def show(figures: dict[str, Any]) -> None:
    for name in ("documents", "tokens", "all", "all first windows"):
        print(f"{name:24} {figures[name]:.5g}")
    whole = figures["all"]
    for name, some in figures["some"].items():
        values = [each["value"] for each in some]
        off = math.sqrt(statistics.fmean((value - whole) ** 2 for value in values))
        mean = statistics.fmean(values)
        held = sum(each["low"] <= whole <= each["high"] for each in some)
        print(
            f"{name:24} {min(values):.4f} to {max(values):.4f}, mean {mean:.4f}, off by {off:.4f} (root mean square); "
            f"{held} of {len(some)} intervals hold {whole:.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, help="else Python's held-out files")
    parser.add_argument("--quantization", default="int4", help="of the candidate")
    parser.add_argument("--documents", type=int, default=200, help="at most so many Python files")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    documents = read_documents([options.text]) if options.text else python_documents(options.documents)
    figures = measure(documents, options.quantization)
    show(figures)
    name = f"quality_windows_{options.text.name.split('.')[0] if options.text else 'python'}_{options.quantization}"
    file_result(name, figures, vars(options), options.json)


if __name__ == "__main__":
    main()
