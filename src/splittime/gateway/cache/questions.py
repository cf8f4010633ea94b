"""The questions of kept answers, and which of them are nearest to another: an exact search, in memory, with numpy.

Questions are compared only within one `likeness`: everything else of their requests is the same, and the embedder too.
Bounded by `max_questions`: who came first goes first.

Makes the vectors of questions, by an upstream of the config that serves embeddings.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from splittime.gateway.breaker import LeftAlone
from splittime.gateway.config import BreakerConfig, EmbedderConfig
from splittime.gateway.decoded_answer import ask_whole
from splittime.gateway.upstream_connections import UpstreamConnections
from splittime.wire.target import Target

MAX_LOOKED_AT = 16  # of the nearest, until one is found that may be given
MAX_ANSWER_BYTES = 2**20
MAX_DIMENSIONS = 8192

Vector = NDArray[np.float32]


class ToldEmbedding(msgspec.Struct):
    embedding: list[float]


class ToldEmbeddings(msgspec.Struct):
    data: list[ToldEmbedding]


class Embedder:
    """Asks an OpenAI-compatible `/v1/embeddings`. name: vectors of different names are never compared."""

    def __init__(
        self, config: EmbedderConfig, breaker: BreakerConfig, key: str | None, connections: UpstreamConnections
    ) -> None:
        self.name = f"{config.model}@{config.url}"
        self._config, self._key, self._connections = config, key, connections
        self._address = Target(url=config.url).address
        self._left_alone = LeftAlone(breaker)

    async def embed(self, text: str) -> Vector | None:
        """Returns a vector of length 1, or None where there is none now: the question is then no hit."""
        return await self._left_alone.unless(lambda: self._asked(text))

    async def _asked(self, text: str) -> Vector | None:
        """Returns None where the text itself is refused. Raises `OSError` where nobody answers, and `ValueError` for
        what is no embedding."""
        body = msgspec.json.encode({"model": self._config.model, "input": text, "encoding_format": "float"})
        where, within_s = (self._connections, self._address, "/v1/embeddings"), self._config.timeout_s
        status, data = await ask_whole(*where, self._key, body, within_s=within_s, max_bytes=MAX_ANSWER_BYTES)
        if 400 <= status < 500:  # as of one that is too long: held against no other
            return None
        if status != 200 or data is None:
            raise ValueError(f"the embedder answered {status}")
        told = msgspec.json.decode(data, type=ToldEmbeddings).data
        if len(told) != 1 or not 0 < len(told[0].embedding) <= MAX_DIMENSIONS:
            raise ValueError("not one embedding")
        return unit(told[0].embedding)


def unit(values: list[float]) -> Vector:
    """Returns the vector of length 1 of this direction. Raises `ValueError` if it has none."""
    found = np.asarray(values, dtype=np.float32)
    length = float(np.linalg.norm(found))
    if not np.isfinite(length) or length == 0.0:
        raise ValueError("an embedding without a direction")
    return found / np.float32(length)


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
