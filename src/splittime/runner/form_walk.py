"""Where answers stand in the grammars that hold them, and what must follow there.

Looks at places of answers: what may come there, by the parser, and how long that takes.

Walks move one at a time: whoever looks has all of them for as long as it asks.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import islice, takewhile
from typing import Any, NamedTuple, Protocol

import llguidance
import numpy as np

from splittime.core.errors import ErrorInfo, RequestError
from splittime.kernels.draw import one_bit

SHOWN_CHARS = 500  # of what the parser says
MOST_FORCED = 16  # tokens of a row; what comes behind is told with the next
MOST_KEPT = 4096  # forced tokens: to ask the parser again takes as long as all of a forced text
Key = tuple["Walk", int, tuple[int, ...]]  # of a place: who, behind how many outputs, and which drafts


class Walk(Protocol):
    """Where one request's answer stands in its form."""

    def must_come(self, outputs: np.ndarray) -> Sequence[int]:
        """Returns what is known to have to follow these outputs, without asking; of a row."""
        ...


class GrammarWalk:
    """Where one request's answer stands in its grammar. begin: the compiled grammar, of which it walks copies. owner:
    whose it is. elsewhere: where it goes on when the parser gives up; None: nowhere."""

    def __init__(
        self, begin: llguidance.LLMatcher, owner: str = "", elsewhere: Callable[[], Any] | None = None
    ) -> None:
        self._begin, self.matcher, self.owner, self.elsewhere = begin, begin.deep_copy(), owner, elsewhere
        self._num_sure, self._guesses = 0, list[int]()  # it has consumed so many outputs that are known, and drafts
        self._forced, self._forced_begin = list[int](), 0  # tokens that must follow so many outputs

    def follow(self, outputs: np.ndarray, num_sure: int) -> bool:
        """Goes to behind these outputs. Returns whether the grammar has such a place."""
        if len(outputs) == self._num_sure and not self._guesses:
            return True
        keep = min(self._num_sure, len(outputs))
        ahead, behind = outputs[keep:].tolist(), self._num_sure - keep + len(self._guesses)
        num_same = 0 if keep < self._num_sure else _num_same(ahead, self._guesses)
        if behind > num_same:
            self.matcher.rollback(behind - num_same)
        more = ahead[num_same:]
        num_more = self.matcher.try_consume_tokens(more) if more else 0
        consumed = ahead[: num_same + num_more]
        self._num_sure = min(keep + len(consumed), max(keep, num_sure))
        self._guesses = consumed[self._num_sure - keep :]
        return num_more == len(more)

    def go_on(self, outputs: np.ndarray, end_token_ids: tuple[int, ...], finds_forced: bool) -> tuple[int, ...] | None:
        """Takes in the latest of these outputs, which are known, and what must follow it, up to a row's worth. Returns
        what must follow. Returns None, and `find_forced` tells, where it did not expect the outputs before the latest,
        or is still handing out what it found before."""
        ahead, num_outputs = outputs[self._num_sure :].tolist(), len(outputs)
        knows = self._forced and num_outputs < self._forced_begin + len(self._forced)
        if knows or not ahead or ahead[:-1] != self._guesses or not self.matcher.try_consume_tokens(ahead[-1:]):
            return None
        self._num_sure, self._guesses = num_outputs, []
        if not finds_forced or not (forced := self._ask_forced(num_outputs, end_token_ids)):
            return ()
        self._guesses = forced[: self.matcher.try_consume_tokens(forced)]
        return tuple(forced) if self._guesses == forced else None

    def must_come(self, outputs: np.ndarray) -> list[int]:
        """Returns what is known to have to follow these outputs, without asking the parser; of a row."""
        if not self._forced or len(outputs) < self._forced_begin:
            return []
        so_far = outputs[self._forced_begin :].tolist()
        num_same = len(so_far)
        return self._forced[num_same : num_same + MOST_FORCED] if so_far == self._forced[:num_same] else []

    def find_forced(self, place: "FormPlace") -> list[int]:
        """Returns what must follow these outputs, which are known, up to a token that ends the request; of a row."""
        if (known := self.must_come(place.outputs)) or not self.follow(place.outputs, place.num_sure):
            return known
        return self._ask_forced(len(place.outputs), place.end_token_ids)

    def _ask_forced(self, num_outputs: int, end_token_ids: tuple[int, ...]) -> list[int]:
        """Returns what must follow where it stands, behind so many outputs; of a row."""
        self._forced, self._forced_begin = self.matcher.compute_ff_tokens(), num_outputs
        if self._forced:
            ahead = takewhile(lambda token: token not in end_token_ids, self._forced)
            self._forced = list(islice(ahead, MOST_KEPT))
        return self._forced[:MOST_FORCED]

    def check(self, outputs: np.ndarray, num_sure: int) -> bool:
        """Returns whether the parser still follows, after a look behind these outputs; it may lose a draft. Raises
        RequestError where it cannot go on."""
        if self.matcher.is_error() and len(outputs) > num_sure:
            self._start_again()  # a draft was too much for the parser: the answer itself may not be
            return False
        if self.matcher.is_error() or self._num_sure + len(self._guesses) < min(num_sure, len(outputs)):
            words = said(self.matcher) or "it does not know this answer"
            raise too_much(f"the form that the answer is held to: {words}")
        return True

    def _start_again(self) -> None:
        self.matcher, self._num_sure, self._guesses = self._begin.deep_copy(), 0, []


def key_of(walk: "Walk", outputs: np.ndarray, num_sure: int) -> Key:
    """Returns the key of the place behind these outputs, of which so many are known and the others drafts."""
    return walk, len(outputs), tuple(outputs[num_sure:].tolist()) if len(outputs) > num_sure else ()


class FormPlace:
    """Where an answer is looked at: behind `outputs`, int64 [N], of which `num_sure` are known and the others drafts.
    end_token_ids: those that end the request."""

    __slots__ = ("end_token_ids", "key", "num_sure", "outputs", "walk")

    def __init__(self, walk: "Walk", outputs: np.ndarray, num_sure: int, end_token_ids: tuple[int, ...]) -> None:
        self.walk: Any = walk  # where it is looked at here, a `GrammarWalk`
        self.outputs, self.num_sure, self.end_token_ids = outputs, num_sure, end_token_ids
        self.key = key_of(walk, outputs, num_sure)

    def behind(self, tokens: Sequence[int]) -> "FormPlace":
        return FormPlace(self.walk, np.append(self.outputs, tokens), self.num_sure, self.end_token_ids)


def _num_same(tokens: list[int], others: list[int]) -> int:
    """Returns how many of them are the same from the first on."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(tokens), len(others)))


def too_much(words: str) -> RequestError:
    hint = "make the form simpler: fewer alternatives that begin alike, shorter repetitions"
    return RequestError(words, code="grammar", param="grammar", hint=hint)


def said(matcher: llguidance.LLMatcher) -> str:
    """Returns what it says is wrong, without the state that it shows after that."""
    return str(matcher.get_error()).partition("\n<state>")[0][:SHOWN_CHARS]


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
