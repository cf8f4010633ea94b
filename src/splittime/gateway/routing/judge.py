"""How likely the small model's answer is good enough: what it was worth for the labelled prompts that are most alike.

A prompt's score is the mean worth of its `neighbours` nearest, weighed by their cosines, and the file's mean where
nothing is like it. Vectors are hashed n-grams (`cache.ngrams`): they know wording, and are made in a millisecond
without a model. The threshold is the lowest at which the expected worth reaches the target; what is expected is found
by cross-validation: each labelled prompt is scored without those of its own fold, and equal texts are in one fold.

Scores are rounded, so that the same file and text have the same score whatever order a processor adds numbers in.
"""

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from splittime.core.errors import ConfigError
from splittime.gateway.cache.ngrams import embedded
from splittime.gateway.config import DifficultyConfig, GatewayConfig
from splittime.gateway.routing.labels import LabelledFile, LabelledPrompt, read_labels

FOLDS = 10
DECIMALS = 4  # of a score and a threshold
COSINE_DECIMALS = 5
ALWAYS_SMALL, ALWAYS_LARGE = 0.0, 1.0001  # thresholds
AT_ONCE = 256  # prompts that are compared with all others at once
ALMOST = 1e-9  # by which a mean may miss the target, as sums do
MAX_KEPT = 4  # judges

Floats = NDArray[np.float64]


class ChosenThreshold(msgspec.Struct, frozen=True, kw_only=True):
    """threshold: scores from which on the small model is asked. share_small, quality: as expected. prompts: labelled
    ones."""

    threshold: float
    share_small: float
    quality: float
    prompts: int


class DifficultyJudge:
    """labels: the digest of the file that it was made of."""

    def __init__(self, file: LabelledFile, neighbours: int, target: float) -> None:
        self.labels, self.neighbours = file.digest, neighbours
        self._vectors = np.stack([embedded(prompt.text) for prompt in file.prompts])
        self._folds = np.array([fold_of(prompt.text) for prompt in file.prompts])
        self._texts = frozenset(normal(prompt.text) for prompt in file.prompts)
        self._worth = np.array([float(prompt.small_right) for prompt in file.prompts])
        self._mean = float(self._worth.mean())
        scores = self._scores(self._vectors, self._folds)
        self.chosen = calibrated(scores, self._worth, worth_of_large(file.prompts), target)

    def score(self, text: str) -> float | None:
        """Returns the score of a text; None for one that is empty."""
        if not text.strip():
            return None
        return self._score(self._vectors @ embedded(text), self._worth)

    def knows(self, text: str) -> bool:
        """Whether the labels have this text."""
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


def worth_of_large(prompts: Sequence[LabelledPrompt]) -> Floats:
    """Returns what the large model's answers are worth: 1 where the file does not say."""
    return np.array([1.0 if one.large_right is None else float(one.large_right) for one in prompts])


def calibrated(scores: Floats, small: Floats, large: Floats, target: float) -> ChosenThreshold:
    """Returns the cheapest threshold that reaches the target. Raises `ConfigError` if none does."""
    thresholds = [ALWAYS_SMALL, *np.unique(scores).tolist(), ALWAYS_LARGE]
    for threshold in thresholds:
        goes_small = scores >= threshold
        quality = float(np.where(goes_small, small, large).mean())
        if quality >= target - ALMOST:
            share = float(goes_small.mean())
            return ChosenThreshold(threshold=threshold, share_small=share, quality=quality, prompts=len(scores))
    best = float(large.mean())
    hint = "lower the target, or name a better large model"
    message = f"target {target:g} is not reached, though all prompts go to the large model, which reaches {best:.3f}"
    raise ConfigError(message, param="target", value=target, limit=best, hint=hint)


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
