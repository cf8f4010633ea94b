"""What makes a question's vector: n-grams, without a model (`NgramEmbedder`), or an upstream of the config.

`embed` returns a vector of length 1, or None where there is none now: the question is then no hit.
"""

import asyncio
import time
from concurrent.futures import Executor
from typing import Protocol

import msgspec
import numpy as np

from splittime.gateway.breaker import Breaker
from splittime.gateway.cache.ngrams import Vector, embedded
from splittime.gateway.config import BreakerConfig, EmbedderConfig
from splittime.gateway.upstream_connections import UpstreamConnections
from splittime.gateway.whole_answers import ask_whole
from splittime.wire.target import Target

MAX_ANSWER_BYTES = 2**20
MAX_DIMENSIONS = 8192


class Embedder(Protocol):
    """name: vectors of different names are never compared."""

    name: str

    async def embed(self, text: str) -> Vector | None:
        """Returns the vector of a text."""


class NgramEmbedder:
    name = "ngrams-1"

    def __init__(self, thread: Executor) -> None:
        self._thread = thread

    async def embed(self, text: str) -> Vector | None:
        return await asyncio.get_running_loop().run_in_executor(self._thread, embedded, text)


class ToldEmbedding(msgspec.Struct):
    embedding: list[float]


class ToldEmbeddings(msgspec.Struct):
    data: list[ToldEmbedding]


class UpstreamEmbedder:
    """Asks an OpenAI-compatible `/v1/embeddings`. One that fails again and again is left alone for a while."""

    def __init__(
        self, config: EmbedderConfig, breaker: BreakerConfig, key: str | None, connections: UpstreamConnections
    ) -> None:
        self.name = f"{config.model}@{config.url}"
        self._config, self._key, self._connections = config, key, connections
        self._address = Target(url=config.url).address
        self._breaker = Breaker(breaker)
        self.num_failures = 0

    async def embed(self, text: str) -> Vector | None:
        if not self._breaker.allows(time.monotonic_ns()):
            return None
        self._breaker.begin()
        try:
            found = unit(await self._asked(text))
        except (OSError, ValueError):
            self.num_failures += 1
            self._breaker.note_failure(time.monotonic_ns())
            return None
        except asyncio.CancelledError:
            self._breaker.note_nothing()
            raise
        self._breaker.note_success()
        return found

    async def _asked(self, text: str) -> list[float]:
        """Raises `ValueError` for what is no embedding."""
        body = msgspec.json.encode({"model": self._config.model, "input": text, "encoding_format": "float"})
        where, within_s = (self._connections, self._address, "/v1/embeddings"), self._config.timeout_s
        status, data = await ask_whole(*where, self._key, body, within_s=within_s, max_bytes=MAX_ANSWER_BYTES)
        if status != 200 or data is None:
            raise ValueError(f"the embedder answered {status}")
        told = msgspec.json.decode(data, type=ToldEmbeddings).data
        if len(told) != 1 or not 0 < len(told[0].embedding) <= MAX_DIMENSIONS:
            raise ValueError("not one embedding")
        return told[0].embedding


def unit(values: list[float]) -> Vector:
    """Returns the vector of length 1 of this direction. Raises `ValueError` if it has none."""
    found = np.asarray(values, dtype=np.float32)
    length = float(np.linalg.norm(found))
    if not np.isfinite(length) or length == 0.0:
        raise ValueError("an embedding without a direction")
    return found / np.float32(length)
