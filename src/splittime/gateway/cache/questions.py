"""The questions of kept answers, and which of them are nearest to another: an exact search, in memory, with numpy.

Questions are compared only within one `likeness`: everything else of their requests is the same, and the embedder too.
Bounded by `max_questions`: who came first goes first.
"""

from typing import NamedTuple

import numpy as np

from splittime.gateway.cache.gate import Features, agrees
from splittime.gateway.cache.ngrams import Vector

MAX_LOOKED_AT = 16  # of the nearest, with the gate


class LikeQuestion(NamedTuple):
    key: str
    features: Features


class QuestionGroup:
    """The questions of one likeness: row n of `vectors` is that of `held[n]`."""

    def __init__(self, dimensions: int) -> None:
        self.held: list[LikeQuestion] = []
        self.vectors = np.zeros((4, dimensions), dtype=np.float32)

    def add(self, question: LikeQuestion, vector: Vector) -> None:
        if len(self.held) == len(self.vectors):
            self.vectors = np.concatenate([self.vectors, np.zeros_like(self.vectors)])
        self.vectors[len(self.held)] = vector
        self.held.append(question)

    def discard(self, key: str) -> None:
        """Put the last in the place of the one that goes."""
        at = next((at for at, question in enumerate(self.held) if question.key == key), None)
        if at is not None:
            last = self.held.pop()
            if at < len(self.held):
                self.held[at] = last
                self.vectors[at] = self.vectors[len(self.held)]

    def nearest(self, vector: Vector, threshold: float) -> list[tuple[float, LikeQuestion]]:
        """Returns those whose cosine reaches the threshold, the nearest first."""
        cosines = self.vectors[: len(self.held)] @ vector
        reached = np.flatnonzero(cosines >= threshold)
        ordered = reached[np.argsort(-cosines[reached], kind="stable")][:MAX_LOOKED_AT]
        return [(float(cosines[at]), self.held[at]) for at in ordered]


class QuestionIndex:
    def __init__(self, max_questions: int) -> None:
        self._max_questions = max_questions
        self._groups: dict[str, QuestionGroup] = {}
        self._likeness: dict[str, str] = {}  # by key, the oldest first

    def __len__(self) -> int:
        return len(self._likeness)

    def add(self, key: str, likeness: str, features: Features, vector: Vector) -> None:
        self.discard(key)
        group = self._groups.get(likeness)
        if group is None:
            group = self._groups[likeness] = QuestionGroup(len(vector))
        if len(vector) != group.vectors.shape[1]:
            return  # of an upstream that answers with another model under one name
        group.add(LikeQuestion(key, features), vector)
        self._likeness[key] = likeness
        while len(self._likeness) > self._max_questions:
            self.discard(next(iter(self._likeness)))

    def discard(self, key: str) -> None:
        likeness = self._likeness.pop(key, None)
        if likeness is not None:
            self._groups[likeness].discard(key)
            if not self._groups[likeness].held:
                del self._groups[likeness]

    def alike(self, likeness: str, features: Features, vector: Vector, threshold: float) -> list[str]:
        """Returns the keys of answers that may be given, the nearest question first: near enough, and through the
        gate."""
        group = self._groups.get(likeness)
        if group is None or len(vector) != group.vectors.shape[1]:
            return []
        found = group.nearest(vector, threshold)
        return [question.key for _, question in found if agrees(features, question.features)]
