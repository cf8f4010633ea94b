"""Makes the vectors of questions, by an upstream of the config that serves embeddings."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from splittime.gateway.cache.left_alone import LeftAlone
from splittime.gateway.config import BreakerConfig, EmbedderConfig
from splittime.gateway.upstream_connections import UpstreamConnections
from splittime.gateway.whole_answers import ask_whole
from splittime.wire.target import Target

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
