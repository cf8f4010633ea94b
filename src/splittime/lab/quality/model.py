"""What the gate asks of a model, and what it gets: log-probabilities of what may follow, in pieces of bounded size.

A piece holds the predictions after some neighbouring tokens of a text. `Dense` has the whole vocabulary, `Sparse` what
a server tells: the token that came, and the likeliest few. `Reads` is the proof that what the model claims to keep in
fewer bits was read in those bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from splittime.stats.paired import Floats

Ids = NDArray[np.int64]
CHUNK_TOKENS = 64
"""Tokens of a prefill chunk: a text longer than one chunk attends to what earlier chunks left in the KV cache."""
PIECE_TOKENS = 32
"""Whose predictions are held at once: 40 MB in float64 for a vocabulary of 152,000."""


@dataclass(frozen=True)
class Dense:
    """logprobs: float64 [n, vocab], of what follows the tokens at positions begin to begin + n - 1."""

    begin: int
    logprobs: Floats


@dataclass(frozen=True)
class Sparse:
    """following: float64 [n], of the token that came. tops: one for each position, id to log-probability."""

    begin: int
    following: Floats
    tops: Sequence[Mapping[int, float]]


Piece = Dense | Sparse


@dataclass
class Reads:
    """What a model claims to keep in fewer bits, and what its kernels read while it was measured.

    claims: names of `Ops.bytes_read`, such as "weights.int4" and "kv.int8". read: bytes by those names.
    weights_least, kv_least: bytes of the layers' packed weights (a head may be kept as it was), and of cache written by
        earlier steps, that cannot but have been read if they were used as claimed.
    """

    claims: tuple[str, ...] = ()
    read: dict[str, int] = field(default_factory=dict)
    weights_least: int = 0
    kv_least: int = 0


class Model(Protocol):
    """name: for people. max_tokens: the longest text, a token of room left. facts: for the report.

    reads: None where nothing can be known of it (a server elsewhere).
    has_decode: whether `decode_tokens` below changes anything.
    """

    name: str
    vocab_size: int
    max_tokens: int
    facts: Mapping[str, object]
    has_decode: bool

    @property
    def reads(self) -> Reads | None: ...

    def predictions(self, token_ids: Sequence[int], begin: int, decode_tokens: int) -> Iterator[Piece]:
        """After each token from position `begin` to the last but one, in order. The last `decode_tokens` of these
        tokens are computed one a step, as when they were generated; those before in chunks. Cut as by `pieces`."""

    def continuations(self, prompt: Sequence[int], endings: Sequence[Sequence[int]]) -> list[float]:
        """The log-probability of each ending after the prompt."""

    def generate(self, prompts: Sequence[str], max_tokens: int, stop: Sequence[str], tell: Callable) -> list[str]:
        """Greedy; `tell(done)` after each."""


def chunks(num_fed: int, decode_tokens: int) -> list[tuple[int, int]]:
    """[begin, end) of each step over so many tokens: whole chunks, then the last `decode_tokens` one by one."""
    prompt = max(1, num_fed - decode_tokens)
    whole = [(at, min(at + CHUNK_TOKENS, prompt)) for at in range(0, prompt, CHUNK_TOKENS)]
    return whole + [(at, at + 1) for at in range(prompt, num_fed)]


def pieces(chunk: tuple[int, int], begin: int) -> list[tuple[int, int]]:
    """Returns what of a chunk lies at `begin` or later, `PIECE_TOKENS` at a time."""
    start, end = chunk
    return [(at, min(at + PIECE_TOKENS, end)) for at in range(max(start, begin), end, PIECE_TOKENS)]


def log_softmax(logits: NDArray[np.float32]) -> Floats:
    """logits [n, vocab] -> the same less their log-sum-exp, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide
