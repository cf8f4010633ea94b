"""Texts of a step on several threads: with the native kernels each thread computes whole texts by itself.

Of an encoder's time products take two thirds, and only they are shared among the kernels' threads: attention, norms and
activations are torch's, which has one thread beside them, since two pools would fight for the same cores. Texts do not
depend on each other, so that threads which take parts of a step share all of it, and wait for each other once. The
vectors are the same to the last bit, as no kernel looks at what is beside a token. One exception: where a GELU by tanh
has an inner size that is no multiple of 32, torch computes the last numbers of a step or part by another formula, whose
results are up to 6e-8 apart.

A text that makes up most of its step is computed with the kernels' threads, and so are few tokens: each thread would
read all weights for its own.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain

import torch
from torch import Tensor

from splittime.kernels.native.library import library
from splittime.models.encoder import TextEncoder
from splittime.models.modern_encoder import ModernEncoder

PART_TOKENS = 128  # of a part, about: products are as quick as of more, and threads end at about the same time
LEAST_TOKENS = 64  # of a part, on average: with fewer, reading the weights once more takes longer than is gained
PRODUCTS = 2 / 3  # of an encoder's time

Part = list[int]  # of a step's texts, by their places


class TextParts:
    """Computes the texts of a step. num_threads: of the kernels."""

    def __init__(self, encoder: TextEncoder | ModernEncoder, num_threads: int) -> None:
        self._encoder, self._num_threads = encoder, num_threads if encoder.ops.name == "native" else 1
        self._threads: ThreadPoolExecutor | None = None
        if self._num_threads > 1:
            self._threads = ThreadPoolExecutor(self._num_threads, "encoder", initializer=library().st_work_alone)

    def warm_up(self, text: Sequence[int]) -> None:
        """Computes this text with the kernels' threads, and on each thread that takes parts."""
        self._computed([text])
        if self._threads is not None:
            list(self._threads.map(self._computed, [[text]] * self._num_threads))

    def forward(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """texts: token ids, at least one each -> for each text the last layer's outputs, float32 [tokens, hidden].
        Where computing one fails, its error is raised when no thread computes any more."""
        parts = parts_of([len(text) for text in texts], self._num_threads)
        if self._threads is None or len(parts) == 1:
            return self._computed(texts)
        computing = [self._threads.submit(self._computed, [texts[place] for place in part]) for part in parts]
        wait(computing)
        made = [each.result() for each in computing]
        found = dict(zip(chain(*parts), chain(*made), strict=True))
        return tuple(found[place] for place in range(len(texts)))

    @torch.inference_mode()
    def _computed(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        return self._encoder.forward(texts, are_pairs=self._encoder.head is not None)


def parts_of(sizes: Sequence[int], num_threads: int) -> list[Part]:
    """sizes: tokens of each text -> parts of about as many tokens each, the largest first, which the threads take one
    after the other. There is a single one where all texts together are done sooner."""
    total, together = sum(sizes), [list(range(len(sizes)))]
    num_parts = min(num_threads * -(-total // (num_threads * PART_TOKENS)), total // LEAST_TOKENS)
    if num_threads == 1 or num_parts < 2:
        return together
    tokens, parts = [0] * num_parts, dict[int, Part]()
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        least = tokens.index(min(tokens))
        tokens[least] += sizes[place]
        parts.setdefault(least, []).append(place)
    if max(tokens) >= total * (1 - PRODUCTS + PRODUCTS / num_threads):
        return together
    return [parts[number] for number in sorted(parts, key=lambda number: -tokens[number])]
