"""The teacher's own outputs: prompts cut from the text, what the teacher says after them, and where that is kept.

A student that sees only people's text never sees the places that its teacher leads to; sampled sequences do
(Kim and Rush 2016, arXiv:1606.07947). Each is sampled at temperature 1 with a seed of its own, so the same command
gives the same sequences; they are kept a group at a time, and a killed run writes only the groups that are missing.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from splittime.core.errors import ConfigError
from splittime.lab.quality.documents import DocumentTokens
from splittime.lab.quantize import tensor_file

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 448
GROUP = 64
Prompts = list[tuple[int, ...]]
Write = Callable[[Prompts, Sequence[int], int], list[tuple[int, ...]]]
"""(prompts, a seed for each, tokens at most) -> what the teacher says after each."""


def prompts(documents: Sequence[DocumentTokens], count: int, length: int, seed: int) -> Prompts:
    """Drawn from all places of the text alike; a document shorter than `length` gives what it has."""
    random = np.random.default_rng((seed, 1))
    places = np.array([max(1, len(document.ids) - length + 1) for document in documents], dtype=np.float64)
    chosen = random.choice(len(documents), size=count, p=places / places.sum())
    begins = [int(random.integers(int(places[number]))) for number in chosen]
    cut = (documents[number].ids[begin : begin + length] for number, begin in zip(chosen, begins, strict=True))
    return [tuple(ids) for ids in cut]


def sequences(folder: Path, asked: Prompts, seed: int, output_tokens: int, write: Write, tell: Callable) -> np.ndarray:
    """One stream: each prompt with what the teacher said after it. `tell(done, of)` after each group."""
    parts: list[tuple[int, ...]] = []
    for begin in range(0, len(asked), GROUP):
        tell(begin, len(asked))
        parts += _group(
            folder / f"own-{begin:07d}.json", asked[begin : begin + GROUP], seed, begin, output_tokens, write
        )
    tell(len(asked), len(asked))
    return np.array([token for part in parts for token in part], dtype=np.uint32)


def _group(
    path: Path, asked: Prompts, seed: int, begin: int, output_tokens: int, write: Write
) -> Iterator[tuple[int, ...]]:
    if not path.is_file():
        seeds = [(seed << 32) + begin + number for number in range(len(asked))]
        tensor_file.write_json(path, write(asked, seeds, output_tokens))
    said = _read(path)
    return (tuple(prompt) + tuple(output) for prompt, output in zip(asked, said, strict=True))


def _read(path: Path) -> list[list[int]]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error}", param="out", value=str(path), hint="remove it") from None
