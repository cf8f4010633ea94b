"""The questions of kept answers, and which of them are nearest to another: an exact search, in memory, with numpy.

Questions are compared only within one `likeness`: everything else of their requests is the same, and the embedder too.
Bounded by `max_questions`: who came first goes first.
"""

import numpy as np

from splittime.gateway.cache.embedders import Vector

MAX_LOOKED_AT = 16  # of the nearest, until one is found that may be given


class QuestionGroup:
    """The questions of one likeness: row n of `vectors` is that of the answer `held[n]`."""

    def __init__(self, dimensions: int) -> None:
        self.held: list[str] = []
        self.vectors = np.zeros((4, dimensions), dtype=np.float32)

    def add(self, key: str, vector: Vector) -> None:
        if len(self.held) == len(self.vectors):
            self.vectors = np.concatenate([self.vectors, np.zeros_like(self.vectors)])
        self.vectors[len(self.held)] = vector
        self.held.append(key)

    def discard(self, key: str) -> None:
        """Put the last in the place of the one that goes."""
        if key in self.held:
            at, last = self.held.index(key), self.held.pop()
            if at < len(self.held):
                self.held[at] = last
                self.vectors[at] = self.vectors[len(self.held)]

    def nearest(self, vector: Vector, threshold: float) -> list[str]:
        """Returns the keys of those whose cosine reaches the threshold, the nearest first."""
        cosines = self.vectors[: len(self.held)] @ vector
        reached = np.flatnonzero(cosines >= threshold)
        return [self.held[at] for at in reached[np.argsort(-cosines[reached], kind="stable")][:MAX_LOOKED_AT]]


class QuestionIndex:
    def __init__(self, max_questions: int) -> None:
        self._max_questions = max_questions
        self._groups: dict[str, QuestionGroup] = {}
        self._likeness: dict[str, str] = {}  # by key, the oldest first

    def __len__(self) -> int:
        return len(self._likeness)

    def add(self, key: str, likeness: str, vector: Vector) -> None:
        self.discard(key)
        group = self._groups.get(likeness)
        if group is None:
            group = self._groups[likeness] = QuestionGroup(len(vector))
        if len(vector) != group.vectors.shape[1]:
            return  # of an upstream that answers with another model under one name
        group.add(key, vector)
        self._likeness[key] = likeness
        while len(self._likeness) > self._max_questions:
            self.discard(next(iter(self._likeness)))

    def discard(self, key: str) -> None:
        likeness = self._likeness.pop(key, None)
        if likeness is not None:
            self._groups[likeness].discard(key)
            if not self._groups[likeness].held:
                del self._groups[likeness]

    def near(self, likeness: str, vector: Vector, threshold: float) -> list[str]:
        """Returns the keys of answers to questions that are near enough, the nearest first."""
        group = self._groups.get(likeness)
        if group is None or len(vector) != group.vectors.shape[1]:
            return []
        return group.nearest(vector, threshold)
