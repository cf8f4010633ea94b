"""How likely the small model's answer is good enough: what it was worth for the labelled prompts that are most alike.

A prompt's score is the mean worth of its `neighbours` nearest, weighed by their cosines, and the file's mean where
nothing is like it. Vectors are hashed n-grams (`ngrams`): they know wording, and are made in a millisecond
without a model. The threshold is the lowest at which the worth of answers reaches the target: with the lower end of its
interval, so that few labels promise little. It is found by cross-validation: each labelled prompt is scored without
those of its own fold, and equal texts are in one fold. Where a file does not say what the large model's answers were
worth they are taken to be right, and nothing is uncertain about them.

Scores are rounded, so that the same file and text have the same score whatever order a processor adds numbers in.

Embeddings that need no model: hashed n-grams of characters and words.

These measure *wording*, not meaning: two texts are near if they share letters and words.
"""

import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from splittime.core.errors import ConfigError
from splittime.gateway.config import DifficultyConfig, GatewayConfig
from splittime.gateway.routing.labels import LabelledFile, LabelledPrompt, read_labels

FOLDS = 10
DECIMALS = 4  # of a score and a threshold
COSINE_DECIMALS = 5
ALWAYS_SMALL, ALWAYS_LARGE = 0.0, 1.0001  # thresholds
AT_ONCE = 256  # prompts that are compared with all others at once
ALMOST = 1e-9  # by which a mean may miss the target, as sums do
NORMAL_95 = 1.6449  # of a normal distribution, so many standard deviations below the mean leave 5 %
MAX_KEPT = 4  # judges

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
DIMENSIONS = 1024
MAX_CHARS = 4000
CHARS = (3, 4)  # lengths of n-grams of characters, over words with their borders
WORD_WEIGHT = 2.0  # of a word, or of two in a row, beside one n-gram of characters

Vector = NDArray[np.float32]


class JudgedWorth(NamedTuple):
    """What both models' answers to each prompt are worth. is_told: whether the file says it of the large one's."""

    small: Floats
    large: Floats
    is_told: Bools


class ChosenThreshold(msgspec.Struct, frozen=True, kw_only=True):
    """threshold: scores from which on the small model's answer is had. share_small, quality: as expected. quality_low:
    the lower end of what the answers are worth, which 95 of 100 such files are right about (Wilson, 1927). prompts:
    labelled ones."""

    threshold: float
    share_small: float
    quality: float
    quality_low: float
    prompts: int


class DifficultyJudge:
    """labels: the digest of the file that it was made of."""

    def __init__(self, file: LabelledFile, neighbours: int, target: float) -> None:
        self.labels, self.neighbours = file.digest, neighbours
        self._vectors = np.stack([embedded(prompt.text) for prompt in file.prompts])
        self._folds = np.array([fold_of(prompt.text) for prompt in file.prompts])
        self._texts = frozenset(normal(prompt.text) for prompt in file.prompts)
        worth = worth_of(file.prompts)
        self._worth = worth.small
        self._mean = float(self._worth.mean())
        scores = self._scores(self._vectors, self._folds)
        self.chosen = calibrated(scores, worth, target)

    def score(self, text: str) -> float | None:
        """Returns the score of a text; None for one that is empty."""
        if not text.strip():
            return None
        return self._score(self._vectors @ embedded(text), self._worth)

    def knows(self, text: str) -> bool:
        """Returns whether the labels have this text."""
        return normal(text) in self._texts

    def fair_scores(self, texts: Sequence[str]) -> Floats:
        """Returns the scores of texts, as `score` does, but those that the labels have without their folds."""
        folds = np.array([fold_of(text) if self.knows(text) else FOLDS for text in texts])
        return self._scores(np.stack([embedded(text) for text in texts]), folds)

    def _scores(self, vectors: NDArray[np.float32], folds: NDArray[np.int64]) -> Floats:
        found: list[float] = []
        for at in range(0, len(vectors), AT_ONCE):
            cosines = vectors[at : at + AT_ONCE] @ self._vectors.T
            for row, fold in zip(cosines, folds[at : at + AT_ONCE], strict=True):
                others = self._folds != fold
                found.append(self._score(row[others], self._worth[others]))
        return np.array(found)

    def _score(self, cosines: NDArray[np.float32], worth: Floats) -> float:
        rounded = cosines.astype(np.float64).round(COSINE_DECIMALS)
        nearest = nearest_of(rounded, self.neighbours)
        weights = np.maximum(rounded[nearest], 0.0)
        total = float(weights.sum())
        return round(float(weights @ worth[nearest]) / total if total else self._mean, DECIMALS)


def nearest_of(cosines: Floats, number: int) -> NDArray[np.intp]:
    """Returns the places of so many of the highest; of equal ones the first."""
    if number >= len(cosines):
        return np.argsort(-cosines, kind="stable")
    least = np.partition(cosines, len(cosines) - number)[len(cosines) - number]
    among = np.flatnonzero(cosines >= least)
    return among[np.argsort(-cosines[among], kind="stable")][:number]


def normal(text: str) -> str:
    return " ".join(text.lower().split())


def fold_of(text: str) -> int:
    return zlib.crc32(normal(text).encode("utf-8", "surrogatepass")) % FOLDS


def worth_of(prompts: Sequence[LabelledPrompt]) -> JudgedWorth:
    """Returns what the answers are worth; the large model's 1 where the file does not say."""
    told = [one.large_right for one in prompts]
    small = np.array([float(one.small_right) for one in prompts])
    large = np.array([1.0 if one is None else float(one) for one in told])
    return JudgedWorth(small, large, np.array([one is not None for one in told]))


def calibrated(scores: Floats, worth: JudgedWorth, target: float) -> ChosenThreshold:
    """Returns the cheapest threshold that reaches the target. Raises `ConfigError` if none does."""
    found = cheapest(scores, worth, target, [ALWAYS_SMALL, *np.unique(scores).tolist(), ALWAYS_LARGE])
    if found.quality_low >= target - ALMOST:
        return found
    best, told = found.quality_low, f"{found.quality:.3f}, and {found.quality_low:.3f} at the least"
    hint = "lower the target, label more prompts, or name a better large model"
    message = f"target {target:g} is not reached, though all prompts go to the large model, which reaches {told}"
    raise ConfigError(message, param="target", value=target, limit=best, hint=hint)


def cheapest(scores: Floats, worth: JudgedWorth, target: float, thresholds: Sequence[float]) -> ChosenThreshold:
    """Returns the first of these thresholds, which rise, that reaches the target; else the last."""
    for threshold in thresholds:
        found = _expected(threshold, scores >= threshold, worth)
        if found.quality_low >= target - ALMOST:
            break
    return found


def _expected(threshold: float, goes_small: Bools, worth: JudgedWorth) -> ChosenThreshold:
    had, is_seen = np.where(goes_small, worth.small, worth.large), goes_small | worth.is_told
    seen, taken = int(is_seen.sum()), int((~is_seen).sum())  # of answers that were judged, or taken to be right
    low = (lower_end(float(had[is_seen].mean()), seen) * seen + taken) / len(had) if seen else 1.0
    return ChosenThreshold(
        threshold=threshold,
        share_small=float(goes_small.mean()),
        quality=float(had.mean()),
        quality_low=low,
        prompts=len(had),
    )


def lower_end(mean: float, count: int) -> float:
    """Returns below what the mean of such values, from 0 to 1, is with a chance of 5 % at the most."""
    square = NORMAL_95**2 / count
    spread = NORMAL_95 * sqrt(max(0.0, mean * (1 - mean)) / count + square / (4 * count))
    return max(0.0, (mean + square / 2 - spread) / (1 + square))


# ---- those of a config

_kept: dict[tuple[str, int, float], DifficultyJudge] = {}


def judges_of(config: GatewayConfig) -> Mapping[str, DifficultyJudge]:
    """Returns a judge for each `[[difficulty]]` with labels, by its model. Raises `ConfigError`. Takes up to half a
    minute for a file of the longest."""
    routes = enumerate(config.difficulty)
    return {route.model: _judge(route, f"difficulty[{at}]") for at, route in routes if route.labels is not None}


def _judge(route: DifficultyConfig, path: str) -> DifficultyJudge:
    file = read_labels(Path(route.labels or ""), f"{path}.labels")
    try:
        return _made(file, route.neighbours, route.target)
    except ConfigError as error:
        info = error.info
        message, param = f"{path}.{info.message}", f"{path}.{info.param}"
        raise ConfigError(message, param=param, value=info.value, limit=info.limit, hint=info.hint) from None


def _made(file: LabelledFile, neighbours: int, target: float) -> DifficultyJudge:
    """Returns the judge, which is not made again where a config is read again for its keys."""
    key = (file.digest, neighbours, target)
    found = _kept.pop(key, None) or DifficultyJudge(file, neighbours, target)
    _kept[key] = found
    while len(_kept) > MAX_KEPT:
        _kept.pop(next(iter(_kept)))
    return found


def embedded(text: str) -> Vector:
    """Returns a vector of length 1 (of length 0 for a text without a letter or digit)."""
    found = np.zeros(DIMENSIONS, dtype=np.float32)
    for (part, weight), times in Counter(_parts(text[:MAX_CHARS])).items():
        hashed = zlib.crc32(part.encode("utf-8", "surrogatepass"))
        sign = 1.0 if hashed & 0x80000000 else -1.0
        found[hashed % DIMENSIONS] += sign * weight * (1.0 + math.log(times))
    length = float(np.linalg.norm(found))
    return found / length if length else found


def _parts(text: str) -> Iterator[tuple[str, float]]:
    words = "".join(letter if letter.isalnum() else " " for letter in text.lower()).split()
    for word in words:
        framed = f"<{word}>"
        for size in CHARS:
            yield from ((framed[at : at + size], 1.0) for at in range(len(framed) - size + 1))
        yield f"w {word}", WORD_WEIGHT
    yield from ((f"w {one} {two}", WORD_WEIGHT) for one, two in pairwise(words))
