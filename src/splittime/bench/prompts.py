"""What synthetic prompts are made of, token by token, and the salt that keeps a prefix cache from hitting by accident.

Token ids are drawn from the middle of the vocabulary: special ids stand at its ends (Mistral's first 768, Gemma's first
hundred or so; Llama 3's last 256, DeepSeek's last 1,280). Where a server takes no ids, words stand for tokens: about
one token each, not exactly.

A salt is a prompt's first tokens or characters, drawn from the seed, the run's salt and the prompt's own name. Blocks
are found by their prefix, so one differing token at the start makes the whole prompt a new one.
"""

from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from splittime.bench.distributions import bit_stream, stream
from splittime.core.errors import ConfigError

SALT_TOKENS = 8
MIN_VOCAB_SIZE = 16
MAX_TOKENS = 250_000_000  # two gigabytes
_MOST_SPECIAL_AT_START = 1000

Ids = NDArray[np.uint32]

_WORDS = """
about after again all also and any around ask away back because been before began between both bring but by
came can change city close cold come could country cut day did different does done down each early earth end
every eye face family far father feet few find first follow food for form found four from garden gave get girl
give going good great ground group grow had half hand hard has have head hear help here high home house how
"""


class Alphabet(msgspec.Struct, frozen=True):
    """Symbols [low, high). `symbols` are shared objects: a prompt of a million tokens costs 8 bytes for each."""

    low: int
    high: int
    symbols: NDArray[Any]

    def draw(self, rng: Generator, count: int) -> Ids:
        if count > MAX_TOKENS:
            hint = "Make the run shorter, or give --length-scale below 1."
            what = f"{count:,} tokens of prompts are too many to be drawn beforehand"
            raise ConfigError(what, param="num_requests", value=count, limit=MAX_TOKENS, hint=hint)
        return rng.integers(self.low, self.high, count, dtype=np.uint32)

    def prompt(self, ids: Ids) -> tuple[int, ...] | str:
        chosen = self.symbols[ids].tolist()
        return " ".join(chosen) if isinstance(self.symbols[self.low], str) else tuple(chosen)

    def text(self, ids: Ids) -> str:
        return " ".join(map(str, self.symbols[ids].tolist()))


def token_ids(vocab_size: int | None) -> Alphabet:
    """Ids away from the vocabulary's ends."""
    if vocab_size is None:
        hint = "Give --prompt-form text or chat."
        raise ConfigError("the size of the server's vocabulary is not known", param="prompt_form", hint=hint)
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"a vocabulary of {vocab_size} has too few ids", param="vocab_size", value=vocab_size, limit=MIN_VOCAB_SIZE
        )
    low = min(_MOST_SPECIAL_AT_START, max(3, vocab_size // 32))
    return Alphabet(low, vocab_size - max(1, vocab_size // 50), np.arange(vocab_size).astype(object))


def words() -> Alphabet:
    known = _WORDS.split()
    return Alphabet(0, len(known), np.array(known, dtype=object))


class Salt(msgspec.Struct, frozen=True):
    """`run` differs between runs that are to find nothing of each other; `is_off` where reuse is asked for."""

    seed: int
    run: str | None = None
    is_off: bool = False

    def ids(self, alphabet: Alphabet, *name: str, count: int = 1) -> Ids:
        """`count` rows of the first tokens of prompts of this name."""
        rng = stream(self.seed, "salt", self.run or "", *name)
        return alphabet.draw(rng, count * SALT_TOKENS).reshape(count, SALT_TOKENS)

    def text(self, *name: str) -> str:
        """The first characters of a prompt; empty if off."""
        if self.is_off:
            return ""
        name_text = "\0".join((str(self.seed), self.run or "", *name))
        return f"[{blake2b(name_text.encode(), digest_size=6).hexdigest()}] "

    def put_on(self, ids: Ids, salt_ids: Ids, at: int = 0) -> None:
        """Overwrite, in place, the tokens from `at` on: the length stays as it was."""
        if not self.is_off:
            room = ids[at : at + SALT_TOKENS]
            room[:] = salt_ids[: len(room)]


class BlockIds:
    """Token ids of the blocks of a trace: the same block id gives the same tokens, in any order, within one salt.

    A block has a place of its own in one stream of bits. Raw words are scaled to the alphabet, so that a place is as
    long for every block: with 32 bits for a token, no symbol is likelier than another by more than 1 in 10,000.
    """

    def __init__(self, alphabet: Alphabet, salt: Salt, tokens_per_block: int, name: str) -> None:
        run = "" if salt.is_off else f"salted {salt.run or ''}"
        self._bits = bit_stream(salt.seed, "blocks", run, name)
        self._at_word = 0
        self._alphabet = alphabet
        self._words_per_block = (tokens_per_block + 1) // 2

    def of(self, first_id: int, count: int) -> Ids:
        """A row for each of `count` consecutive blocks; jumping costs more than drawing, so they are drawn at once."""
        begin, num_words = first_id * self._words_per_block, count * self._words_per_block
        self._bits.advance((begin - self._at_word) % 2**128)
        self._at_word = begin + num_words
        halves = self._bits.random_raw(num_words).astype("<u8", copy=False).view("<u4").astype(np.uint64)
        width = np.uint64(self._alphabet.high - self._alphabet.low)
        ids = ((halves * width) >> np.uint64(32)).astype(np.uint32) + np.uint32(self._alphabet.low)
        return ids.reshape(count, -1)
