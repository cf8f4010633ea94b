"""Looks at places of answers: what may come there, by the parser, and how long that takes.

Walks move one at a time: whoever looks has all of them for as long as it asks.
"""

import threading
import time
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import llguidance
import numpy as np

from splittime.core.errors import ErrorInfo, RequestError
from splittime.kernels.draw import one_bit
from splittime.runner.form_walk import FormPlace, Key, too_much

INTERRUPTS = (KeyboardInterrupt, SystemExit)  # a mistake of the parser is no Exception, and none of these
SLOW_NS = 2_000_000  # for one place: a look as long as this counts, though it may have been interrupted


class FoundMask(NamedTuple):
    """allowed: which tokens may come, as in `sampler.Allowed`; None where a draft cannot be, so that what follows it is
    of no interest. error: why the request ends."""

    allowed: np.ndarray | None = None
    error: str | ErrorInfo | None = None


FoundMasks = dict[Key, FoundMask]


class FormLooks:
    """eos_token_id: what the parser takes for the end. num_threads: the parser's."""

    def __init__(self, vocab_size: int, eos_token_id: int, num_threads: int) -> None:
        self._vocab_size, self._eos_token_id, self._num_threads = vocab_size, eos_token_id, num_threads
        self._walking = threading.Lock()
        self._looks_ns, self._look_ns = (0, 0, 0), 0  # what the last looks took, for a place, and what one likely does

    def _has_walks_by(self, end_ns: int) -> bool:
        """Takes the walks; whoever looks beside the steps may have them for longer than a step waits."""
        if self._walking.acquire(blocking=False):
            return True
        return self._walking.acquire(timeout=max(0, end_ns - time.perf_counter_ns()) / 1e9)

    def _learn(self, took_ns: int, *, by_thread: bool) -> None:
        """Looks took so long, for a place. The middle one of three is likely, since one that was interrupted says
        nothing, but not if the longest took more than an interruption: what is slow one time in three is the thread's.
        A thread may have waited for its turn, so that what it took raises nothing."""
        took_ns = min(took_ns, self._look_ns) if by_thread and self._look_ns else took_ns
        self._looks_ns = *self._looks_ns[1:], took_ns
        _, middle_ns, longest_ns = sorted(self._looks_ns)
        self._look_ns = longest_ns if longest_ns >= SLOW_NS else middle_ns

    @cached_property
    def _parser(self) -> llguidance.LLExecutor:
        """Has threads of its own, which whoever forks must not have."""
        return llguidance.LLExecutor(self._num_threads)

    def _look_together(self, places: Sequence[FormPlace]) -> FoundMasks:
        return self.look(places, self._parser)

    def look(self, places: Sequence[FormPlace], parser: llguidance.LLExecutor | None = None) -> FoundMasks:
        """Returns what may come at these places, looking now. parser: looks at several at once; it takes as long to ask
        as a few masks."""
        found: FoundMasks = {}
        while places:  # a walk is at one place at a time
            firsts = {place.walk: place for place in reversed(places)}
            with self._walking:
                found |= self._looked(list(firsts.values()), parser)
            places = [place for place in places if place.key not in found] if len(firsts) < len(places) else ()
        return found

    def _looked(self, places: Sequence[FormPlace], parser: llguidance.LLExecutor | None) -> FoundMasks:
        """Returns what may come at these places, each of another walk."""
        known = self._known(places)
        new = [place for place in places if place.key not in known]
        return known | (self._ask(new, parser) if new else {})

    def _known(self, places: Sequence[FormPlace]) -> FoundMasks:
        """Returns what may come where it is known that only that may."""
        forced = [(place.key, place.walk.must_come(place.outputs)) for place in places]
        return {key: FoundMask(one_bit(tokens[0], self._vocab_size)) for key, tokens in forced if tokens}

    def _ask(self, places: Sequence[FormPlace], parser: llguidance.LLExecutor | None) -> FoundMasks:
        """Returns what the parser says of these places."""
        begin_ns = time.perf_counter_ns()
        try:
            whole = [place for place in places if place.walk.follow(place.outputs, place.num_sure)]
            allowed = self._allowed(whole, parser) if whole else {}
            took_ns = (time.perf_counter_ns() - begin_ns) * min(len(places), self._num_threads if parser else 1)
            self._learn(took_ns // len(places), by_thread=parser is not None)
            return {place.key: _found(place, allowed.get(place.key)) for place in places}
        except INTERRUPTS:
            raise
        except BaseException as failure:  # of whatever kind the parser has: it must end one request alone
            if len(places) == 1:
                error = f"the form that the answer is held to: {type(failure).__name__}"
                return {places[0].key: FoundMask(error=error)}
            return {key: found for place in places for key, found in self._ask([place], parser).items()}

    def _allowed(self, places: Sequence[FormPlace], parser: llguidance.LLExecutor | None) -> dict[Key, np.ndarray]:
        """Returns what the parser allows, as in `FoundMask`."""
        lines = MaskLines(len(places), self._vocab_size, self._eos_token_id)
        lines.fill([place.walk.matcher for place in places], parser)
        for line, place in enumerate(places):
            lines.put_ends(line, place.walk.matcher, place.end_token_ids)
        return dict(zip([place.key for place in places], lines.words, strict=True))


def _found(place: FormPlace, allowed: np.ndarray | None) -> FoundMask:
    try:
        follows = place.walk.check(place.outputs, place.num_sure)
        if allowed is None or not follows:
            return FoundMask()
        if not allowed.any():
            raise too_much("the form that the answer is held to allows no token here")
        return FoundMask(allowed)
    except RequestError as error:
        return FoundMask(error=error.info)


class MaskLines:
    """Room for some masks. words: uint32 [N, vocab / 32], a bit for each token."""

    def __init__(self, count: int, vocab_size: int, eos_token_id: int) -> None:
        self.words = np.zeros((count, -(-vocab_size // 32)), np.uint32)
        self._bits, self._vocab_size, self._eos_token_id = self.words.reshape(-1).data, vocab_size, eos_token_id
        self._begin, self._num_bytes = self.words.ctypes.data, self.words.strides[0]

    def fill(self, matchers: Sequence[llguidance.LLMatcher], parser: llguidance.LLExecutor | None) -> None:
        """Asks each what may come where it stands; `parser` asks all at once."""
        if parser is not None:
            asked = [(one, line) for line, one in enumerate(matchers)]
            parser.unsafe_compute_mask_ptr(asked, self._begin, self._num_bytes, len(self.words))
            return
        for line, matcher in enumerate(matchers):
            self.ask(line, matcher)

    def put_ends(self, line: int, matcher: llguidance.LLMatcher, end_token_ids: tuple[int, ...]) -> bool:
        """Allows all tokens that end a request where the answer could end and none elsewhere, whatever the parser takes
        for its end. Returns whether one was taken away."""
        bits, begin, may_end, took = self._bits, line * self.words.shape[1], matcher.is_accepting(), 0
        for token in (self._eos_token_id, *end_token_ids):
            if token < self._vocab_size:
                word, bit = begin + token // 32, 1 << token % 32
                took |= bits[word] & bit
                bits[word] &= ~bit
        for token in end_token_ids if may_end else ():
            if token < self._vocab_size:
                bits[begin + token // 32] |= 1 << token % 32
        return bool(took)

    def ask(self, line: int, matcher: llguidance.LLMatcher) -> None:
        """Puts into this line what may come where the matcher stands."""
        matcher.unsafe_compute_mask_ptr(self._begin + line * self._num_bytes, self._num_bytes)
