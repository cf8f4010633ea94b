"""Which tokens may come next in answers that are held to a form, found at once or beside the runner's own work.

What may come hangs on the tokens before, and on nothing that the model computes. So the runner looks as soon as they
are known (`look_ahead`); what takes longer than to have a thread do it a thread does, while the step ends, the next is
planned, and the model computes. The sampler takes what was found (`take`), and waits for what is left.

Where a form leaves only one token, or several of which each leaves one, these are known before anything is computed
(`forced`). They are told as drafts, which cannot be wrong: the request's next row has them all, and they take no step
of their own. What the parser said of them is kept, and until they have come it is not asked again.

A token that ends a request is no part of a grammar: it may come wherever the answer could end, and nothing else may
come where it must.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice, takewhile
from typing import TYPE_CHECKING, NamedTuple

import llguidance
import numpy as np

from splittime.core.errors import ErrorInfo, RequestError
from splittime.kernels.draw import one_bit

if TYPE_CHECKING:
    from splittime.runner.batch import Slot

INTERRUPTS = (KeyboardInterrupt, SystemExit)  # a mistake of the parser is no Exception, and none of these
SHOWN_CHARS = 500  # of what the parser says
MOST_FORCED = 16  # tokens of a row; what comes behind is told with the next
MOST_KEPT = 4096  # forced tokens: to ask the parser again takes as long as all of a forced text
QUICK_NS = 500_000  # a thread that finds less, for a step, costs more by waking, and by taking turns, than it saves
Key = tuple["GrammarWalk", int, tuple[int, ...]]  # of a place: who, behind how many outputs, and which drafts


class GrammarWalk:
    """Where one request's answer stands in its grammar. begin: the compiled grammar, of which it walks copies."""

    def __init__(self, begin: llguidance.LLMatcher) -> None:
        self._begin, self.matcher = begin, begin.deep_copy()
        self._num_sure, self._guesses = (
            0,
            list[int](),
        )  # it has consumed so many outputs that are known, and these drafts
        self._forced, self._forced_begin = list[int](), 0  # tokens that must follow so many outputs
        self.look_ns = 0  # of a look, as likely as not at most

    def learn(self, took_ns: int, *, by_thread: bool) -> None:
        """A look took so long: rises at once, and falls slowly. A thread may have waited for its turn, so that what it
        took raises no longer what is known."""
        took_ns = min(took_ns, self.look_ns) if by_thread and self.look_ns else took_ns
        self.look_ns = max(took_ns, self.look_ns * 7 // 8)

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
        ahead = takewhile(lambda token: token not in place.end_token_ids, self.matcher.compute_ff_tokens())
        self._forced, self._forced_begin = list(islice(ahead, MOST_KEPT)), len(place.outputs)
        return self._forced[:MOST_FORCED]

    def check(self, outputs: np.ndarray, num_sure: int) -> bool:
        """Returns whether the parser still follows, after a look behind these outputs; it may lose a draft. Raises
        RequestError where it cannot go on."""
        if self.matcher.is_error() and len(outputs) > num_sure:
            self._start_again()  # a draft was too much for the parser: the answer itself may not be
            return False
        if self.matcher.is_error() or self._num_sure + len(self._guesses) < min(num_sure, len(outputs)):
            words = said(self.matcher) or "it does not know this answer"
            raise _too_much(f"the form that the answer is held to: {words}")
        return True

    def _start_again(self) -> None:
        self.matcher, self._num_sure, self._guesses = self._begin.deep_copy(), 0, []


class FormPlace:
    """Where an answer is looked at: behind `outputs`, int64 [N], of which `num_sure` are known and the others drafts.
    end_token_ids: those that end the request."""

    __slots__ = ("end_token_ids", "key", "num_sure", "outputs", "walk")

    def __init__(self, walk: GrammarWalk, outputs: np.ndarray, num_sure: int, end_token_ids: tuple[int, ...]) -> None:
        self.walk, self.outputs, self.num_sure, self.end_token_ids = walk, outputs, num_sure, end_token_ids
        drafts = tuple(outputs[num_sure:].tolist()) if len(outputs) > num_sure else ()
        self.key: Key = walk, len(outputs), drafts

    def behind(self, tokens: Sequence[int]) -> "FormPlace":
        return FormPlace(self.walk, np.append(self.outputs, tokens), self.num_sure, self.end_token_ids)


class FoundMask(NamedTuple):
    """allowed: which tokens may come, as in `sampler.Allowed`; None where a draft cannot be, so that what follows it is
    of no interest. error: why the request ends."""

    allowed: np.ndarray | None = None
    error: str | ErrorInfo | None = None


FoundMasks = dict[Key, FoundMask]


class FormMasks:
    """The masks of one model's answers. eos_token_id: what the parser takes for the end. num_threads: the parser's."""

    def __init__(self, vocab_size: int, eos_token_id: int, num_threads: int) -> None:
        self._vocab_size, self._eos_token_id, self._num_threads = vocab_size, eos_token_id, num_threads
        self._thread, self._parser = ThreadPoolExecutor(1, "masks"), llguidance.LLExecutor(num_threads)
        self._asked: tuple[Sequence[Slot], Sequence[int], dict[int, FormPlace]] = (), (), {}  # last, and by line
        self._found: FoundMasks = {}
        self._begun: dict[Key, Future[FoundMasks]] = {}
        self._walking = threading.Lock()  # walks move one at a time
        self._waited_ns = 0

    def begin(self, slots: "Sequence[Slot]", counts: Sequence[int]) -> None:
        """Starts to look behind so many outputs of those of these requests that are held to a form, where nobody looks
        yet. Drafts among the outputs stay as they are until `take`."""
        lines = enumerate(zip(slots, counts, strict=True))
        places = {line: _place(slot, count) for line, (slot, count) in lines if slot.grammar is not None}
        self._begin(list(places.values()))
        self._asked = slots, counts, places

    def _begin(self, places: Sequence[FormPlace]) -> None:
        new = [place for place in places if place.key not in self._found and place.key not in self._begun]
        self._found |= (known := self._known(new))
        if new := [place for place in new if place.key not in known]:
            looking = self._thread.submit(self.look, new, self._parser)
            self._begun |= dict.fromkeys([place.key for place in new], looking)

    def look_ahead(self, slots: "Sequence[Slot]", finds_forced: bool) -> list[tuple[int, ...]]:
        """Returns what must follow what is known of each of these requests, which are held to a form, and begins to
        look behind that; where this is quick, it has looked. finds_forced: otherwise it takes it that nothing must."""
        end_ns = time.perf_counter_ns() + QUICK_NS
        places = [_place(slot, slot.num_known - slot.prompt_len) for slot in slots]
        forced = [self.forced(place) if finds_forced else () for place in places]
        places = [place.behind(tokens) if tokens else place for place, tokens in zip(places, forced, strict=True)]
        if left := self._look_until(places, end_ns):
            self._begin(left)
        return forced

    def _look_until(self, places: Sequence[FormPlace], end_ns: int) -> Sequence[FormPlace]:
        """Looks at these places if that is likely to be done by then, and while it is. Returns the others."""
        now_ns, likely_ns = time.perf_counter_ns(), sum(place.walk.look_ns for place in places)
        for at, place in enumerate(places):
            if now_ns + likely_ns > end_ns:
                return places[at:]
            self._found |= self.look([place])
            likely_ns, now_ns = 0, time.perf_counter_ns()
        return ()

    def forced(self, place: FormPlace) -> tuple[int, ...]:
        """Returns the tokens that must follow these outputs, which are known, up to one that ends the request."""
        try:
            with self._walking:
                return tuple(place.walk.find_forced(place))
        except INTERRUPTS:
            raise
        except BaseException:  # of whatever kind the parser has: who looks there next hears of it
            return ()

    def take(self, slots: "Sequence[Slot]", counts: Sequence[int]) -> dict[int, np.ndarray]:
        """Returns by line which tokens may come there, as in `sampler.Allowed`, and forgets what was found elsewhere. A
        request whose answer cannot go on fails (`Slot.end_behind`), and has no line."""
        allowed, begin_ns = {}, time.monotonic_ns()
        if self._asked[:2] != (slots, counts):
            self.begin(slots, counts)
        for line, place in self._asked[2].items():
            found = self._found.get(place.key) or self._begun[place.key].result()[place.key]
            if found.allowed is None:
                slots[line].end_behind(counts[line], found.error)
            else:
                allowed[line] = found.allowed
        self._asked, self._found = ((), (), {}), {}
        self._begun.clear()
        self._waited_ns += time.monotonic_ns() - begin_ns
        return allowed

    def take_waited_ns(self) -> int:
        """Returns how long `take` waited since this was asked last."""
        waited_ns, self._waited_ns = self._waited_ns, 0
        return waited_ns

    def look(self, places: Sequence[FormPlace], parser: llguidance.LLExecutor | None = None) -> FoundMasks:
        """Returns what may come at these places, looking now. parser: looks at several at once; it takes as long to ask
        as a few masks."""
        found: FoundMasks = {}
        while places:  # a walk is at one place at a time
            firsts = {place.walk: place for place in reversed(places)}
            with self._walking:
                found |= self._look_once(list(firsts.values()), parser)
            places = [place for place in places if place.key not in found] if len(firsts) < len(places) else ()
        return found

    def _look_once(self, places: Sequence[FormPlace], parser: llguidance.LLExecutor | None) -> FoundMasks:
        known = self._known(places)
        places = [place for place in places if place.key not in known] if known else places
        return known | self._ask(places, parser) if places else known

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
            for place in places:
                place.walk.learn(took_ns // len(places), by_thread=parser is not None)
            return {place.key: _found(place, allowed.get(place.key)) for place in places}
        except INTERRUPTS:
            raise
        except BaseException as failure:  # of whatever kind the parser has: it must end one request alone
            if len(places) == 1:
                error = f"the form that the answer is held to: {type(failure).__name__}"
                return {places[0].key: FoundMask(error=error)}
            return {key: found for place in places for key, found in self._ask([place], parser).items()}

    def _allowed(self, places: Sequence[FormPlace], parser: llguidance.LLExecutor | None) -> dict[Key, np.ndarray]:
        """Returns what the parser allows, as in `FoundMask`; of the tokens that end a request, all where the answer
        could end and none elsewhere, whatever the parser takes for its end."""
        words = np.zeros((len(places), -(-self._vocab_size // 32)), np.uint32)
        self._fill(words, [place.walk.matcher for place in places], parser)
        words[:, self._eos_token_id // 32] &= ~np.uint32(1 << self._eos_token_id % 32)
        for line, place in zip(words, places, strict=True):
            may_end = place.walk.matcher.is_accepting()
            for token in place.end_token_ids:
                if token < self._vocab_size:
                    word, bit = token // 32, np.uint32(1 << token % 32)
                    line[word] = line[word] | bit if may_end else line[word] & ~bit
        return dict(zip([place.key for place in places], words, strict=True))

    def _fill(
        self, words: np.ndarray, matchers: Sequence[llguidance.LLMatcher], parser: llguidance.LLExecutor | None
    ) -> None:
        begin, num_bytes = words.ctypes.data, words.strides[0]
        if parser is not None:
            parser.unsafe_compute_mask_ptr(
                [(one, line) for line, one in enumerate(matchers)], begin, num_bytes, len(words)
            )
            return
        for line, matcher in enumerate(matchers):
            matcher.unsafe_compute_mask_ptr(begin + line * num_bytes, num_bytes)


def _place(slot: "Slot", num_outputs: int) -> FormPlace:
    assert slot.grammar is not None, "it is held to no form"
    outputs = slot.tokens[slot.prompt_len : slot.prompt_len + num_outputs]
    return FormPlace(slot.grammar, outputs, slot.num_known - slot.prompt_len, slot.admitted.stop_token_ids)


def _num_same(tokens: list[int], others: list[int]) -> int:
    """Returns how many of them are the same from the first on."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(tokens), len(others)))


def _found(place: FormPlace, allowed: np.ndarray | None) -> FoundMask:
    try:
        follows = place.walk.check(place.outputs, place.num_sure)
        if allowed is None or not follows:
            return FoundMask()
        if not allowed.any():
            raise _too_much("the form that the answer is held to allows no token here")
        return FoundMask(allowed)
    except RequestError as error:
        return FoundMask(error=error.info)


def _too_much(words: str) -> RequestError:
    hint = "make the form simpler: fewer alternatives that begin alike, shorter repetitions"
    return RequestError(words, code="grammar", param="grammar", hint=hint)


def said(matcher: llguidance.LLMatcher) -> str:
    """Returns what it says is wrong, without the state that it shows after that."""
    return str(matcher.get_error()).partition("\n<state>")[0][:SHOWN_CHARS]
