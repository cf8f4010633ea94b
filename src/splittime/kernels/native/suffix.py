"""Texts that know what followed their last tokens where these stood before (`csrc/suffix.h`)."""

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from splittime.kernels.native.library import library

OWN, CORPUS = 0, 1
BETWEEN_TEXTS = -1
HANDLES, TOKENS = "Q", "i"  # types of arrays


class SuffixText:
    """Keeps the newest `capacity` tokens, the power of two that is at least what was asked for. Raises
    `LibraryMissing`."""

    def __init__(self, capacity: int) -> None:
        self._free, self.capacity = library().st_text_free, 1 << (capacity - 1).bit_length()
        self.handle: int = library().st_text_new(self.capacity)
        self.num_tokens = 0  # kept of those that `append` brought

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._free(self.handle)

    def append(self, token_ids: Sequence[int]) -> None:
        """Appends tokens; `BETWEEN_TEXTS` ends a text and begins another."""
        tokens = array(TOKENS, token_ids)
        library().st_text_append(self.handle, tokens.buffer_info()[0], len(tokens))
        self.num_tokens = min(self.capacity, self.num_tokens + len(tokens))


class SuffixBatch(NamedTuple):
    """Texts that go on together, each with its corpus or None. handles: of the texts, and of the corpora; places: where
    in memory these two lie."""

    texts: tuple[SuffixText, ...]
    corpora: tuple[SuffixText | None, ...]
    handles: "tuple[array[int], array[int]]"
    places: tuple[int, int]


def suffix_batch(texts: Sequence[SuffixText], corpora: Sequence[SuffixText | None]) -> SuffixBatch:
    handles = array(HANDLES, [text.handle for text in texts])
    of_corpora = array(HANDLES, [0 if corpus is None else corpus.handle for corpus in corpora])
    places = (handles.buffer_info()[0], of_corpora.buffer_info()[0])
    return SuffixBatch(tuple(texts), tuple(corpora), (handles, of_corpora), places)


class Follower:
    """What followed, by text of the batch: `lengths`, how many of its last tokens stood before, 0 if fewer than two;
    `sources`, where, `OWN` or `CORPUS`; `drafts(line)`, what followed there. Of the latest call; the lines behind those
    of its batch mean nothing. Kept buffers, and no numpy: a call comes in many a step.

    most: drafts of a text."""

    def __init__(self, most: int) -> None:
        self._most, self._follow = most, library().st_text_follow
        self._make_room(1)

    def _make_room(self, rows: int) -> None:
        self.lengths, self.sources, self._counts = (array(TOKENS, bytes(4 * rows)) for _ in range(3))
        self._drafts = array(TOKENS, bytes(4 * rows * self._most))
        results = (self.lengths, self.sources, self._counts, self._drafts)
        self._places = [one.buffer_info()[0] for one in results]

    def follow(self, batch: SuffixBatch, new_tokens: Sequence[Sequence[int]]) -> None:
        """Appends each text's new tokens and looks for the longest end of it that stood before, in the text or in its
        corpus, with something behind it."""
        rows = len(batch.texts)
        if rows > len(self.lengths):
            self._make_room(rows)
        counts = array(TOKENS, map(len, new_tokens))
        tokens = array(TOKENS, chain.from_iterable(new_tokens))
        inputs = (*batch.places, counts.buffer_info()[0], tokens.buffer_info()[0])
        self._follow(rows, *inputs, self._most, *self._places)

    def drafts(self, line: int) -> list[int]:
        begin = line * self._most
        return self._drafts[begin : begin + self._counts[line]].tolist()
