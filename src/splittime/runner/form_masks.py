"""Which tokens may come next in answers that are held to a form, found by a thread beside the runner's own work.

What may come hangs on the tokens before, and on nothing that the model computes. So `begin` starts to look as soon as
they are known: while a step ends, the next is planned, and the model computes. The sampler takes what was found
(`take`), and waits for what is left.

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

if TYPE_CHECKING:
    from splittime.runner.batch import Slot

INTERRUPTS = (KeyboardInterrupt, SystemExit)  # a mistake of the parser is no Exception, and none of these
SHOWN_CHARS = 500  # of what the parser says
MOST_FORCED = 16  # tokens of a row; what comes behind is told with the next
MOST_KEPT = 4096  # forced tokens: to ask the parser again takes as long as all of a forced text
Key = tuple["GrammarWalk", int]  # of a place: who, and behind how many outputs


class GrammarWalk:
    """Where one request's answer stands in its grammar. begin: the compiled grammar, of which it walks copies."""

    def __init__(self, begin: llguidance.LLMatcher) -> None:
        self._begin, self.matcher = begin, begin.deep_copy()
        self._num_consumed = self._num_sure = 0
        self._forced, self._forced_begin = np.empty(0, np.int64), 0  # tokens that must follow so many outputs

    def follow(self, outputs: np.ndarray, num_sure: int) -> bool:
        """Goes to behind these outputs. Returns whether the grammar has such a place."""
        keep = min(self._num_sure, len(outputs))
        if self._num_consumed > keep:
            self.matcher.rollback(self._num_consumed - keep)
        ahead = outputs[keep:].tolist()
        num_more = self.matcher.try_consume_tokens(ahead) if ahead else 0
        self._num_consumed = keep + num_more
        self._num_sure = min(self._num_consumed, max(keep, num_sure))
        return num_more == len(ahead)

    def must_come(self, outputs: np.ndarray) -> np.ndarray:
        """Returns what is known to have to follow these outputs, without asking the parser."""
        so_far = outputs[self._forced_begin :]
        if len(outputs) < self._forced_begin or not np.array_equal(so_far, self._forced[: len(so_far)]):
            return self._forced[:0]
        return self._forced[len(so_far) :]

    def find_forced(self, place: "FormPlace") -> np.ndarray:
        """Returns what must follow these outputs, which are known, up to a token that ends the request."""
        if not len(self.must_come(place.outputs)) and self.follow(place.outputs, place.num_sure):
            ahead = takewhile(lambda token: token not in place.end_token_ids, self.matcher.compute_ff_tokens())
            self._forced, self._forced_begin = np.array(list(islice(ahead, MOST_KEPT)), np.int64), len(place.outputs)
        return self.must_come(place.outputs)

    def check(self, outputs: np.ndarray, num_sure: int) -> bool:
        """Returns whether the parser still follows, after a look behind these outputs; it may lose a draft. Raises
        RequestError where it cannot go on."""
        if self.matcher.is_error() and len(outputs) > num_sure:
            self._start_again()  # a draft was too much for the parser: the answer itself may not be
            return False
        if self.matcher.is_error() or self._num_consumed < min(num_sure, len(outputs)):
            words = said(self.matcher) or "it does not know this answer"
            raise _too_much(f"the form that the answer is held to: {words}")
        return True

    def _start_again(self) -> None:
        self.matcher, self._num_consumed, self._num_sure = self._begin.deep_copy(), 0, 0


class FormPlace(NamedTuple):
    """Where an answer is looked at: behind `outputs`, int64 [N], of which `num_sure` are known and the others drafts.
    end_token_ids: those that end the request."""

    walk: GrammarWalk
    outputs: np.ndarray
    num_sure: int
    end_token_ids: tuple[int, ...]

    @property
    def key(self) -> Key:
        return self.walk, len(self.outputs)


class FoundMask(NamedTuple):
    """forbidden: which tokens may not come, bool [vocab]; None where a draft cannot be, so that what follows it is of
    no interest. error: why the request ends."""

    forbidden: np.ndarray | None = None
    error: str | ErrorInfo | None = None


class FormMasks:
    """The masks of one model's answers. eos_token_id: what the parser takes for the end. num_threads: the parser's."""

    def __init__(self, vocab_size: int, eos_token_id: int, num_threads: int) -> None:
        self._vocab_size, self._eos_token_id = vocab_size, eos_token_id
        self._thread, self._parser = ThreadPoolExecutor(1, "masks"), llguidance.LLExecutor(num_threads)
        self._begun: dict[Key, Future[dict[Key, FoundMask]]] = {}
        self._walking = threading.Lock()  # walks move one at a time
        self._waited_ns = 0

    def begin(self, slots: "Sequence[Slot]", counts: Sequence[int]) -> None:
        """Starts to look behind so many outputs of those of these requests that are held to a form, where nobody looks
        yet. Drafts among the outputs stay as they are until `take`."""
        new = [
            _place(slot, walk, count)
            for slot, count in zip(slots, counts, strict=True)
            if (walk := slot.grammar) is not None and (walk, count) not in self._begun
        ]
        if new:
            self._begun |= dict.fromkeys([place.key for place in new], self._thread.submit(self.look, new))

    def forced(self, slot: "Slot") -> tuple[int, ...]:
        """Returns the tokens that must follow what is known of a request that is held to a form, up to one that ends
        it."""
        assert slot.grammar is not None, "it is held to no form"
        place = _place(slot, slot.grammar, slot.num_known - slot.prompt_len)
        try:
            with self._walking:
                return tuple(place.walk.find_forced(place)[:MOST_FORCED].tolist())
        except INTERRUPTS:
            raise
        except BaseException:  # of whatever kind the parser has: who looks there next hears of it
            return ()

    def take(self, slots: "Sequence[Slot]", counts: Sequence[int]) -> dict[int, np.ndarray]:
        """Returns by line which tokens may not come there, bool [vocab], and forgets what was found elsewhere. A
        request whose answer cannot go on fails (`Slot.end_behind`), and has no line."""
        self.begin(slots, counts)
        forbidden, begin_ns = {}, time.monotonic_ns()
        for line, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            if (walk := slot.grammar) is None:
                continue
            found = self._begun[walk, count].result()[walk, count]
            if found.forbidden is None:
                slot.end_behind(count, found.error)
            else:
                forbidden[line] = found.forbidden
        self._waited_ns += time.monotonic_ns() - begin_ns
        self._begun.clear()
        return forbidden

    def take_waited_ns(self) -> int:
        """Returns how long `take` waited since this was asked last."""
        waited_ns, self._waited_ns = self._waited_ns, 0
        return waited_ns

    def look(self, places: Sequence[FormPlace]) -> dict[Key, FoundMask]:
        """Returns what may come at these places, looking now."""
        found: dict[Key, FoundMask] = {}
        while places:  # a walk is at one place at a time
            firsts = {place.walk: place for place in reversed(places)}
            with self._walking:
                found |= self._look_once(list(firsts.values()))
            places = [place for place in places if place.key not in found]
        return found

    def _look_once(self, places: Sequence[FormPlace]) -> dict[Key, FoundMask]:
        forced = {
            place.key: self._all_but(token) for place in places for token in place.walk.must_come(place.outputs)[:1]
        }
        places = [place for place in places if place.key not in forced]
        return forced | self._ask(places) if places else forced

    def _all_but(self, token: int) -> FoundMask:
        forbidden = np.ones(self._vocab_size, bool)
        forbidden[token] = False
        return FoundMask(forbidden)

    def _ask(self, places: Sequence[FormPlace]) -> dict[Key, FoundMask]:
        """Returns what the parser says of these places."""
        try:
            whole = [place for place in places if place.walk.follow(place.outputs, place.num_sure)]
            lines = dict(zip([place.key for place in whole], self._forbidden(whole), strict=True)) if whole else {}
            return {place.key: _found(place, lines.get(place.key)) for place in places}
        except INTERRUPTS:
            raise
        except BaseException as failure:  # of whatever kind the parser has: it must end one request alone
            if len(places) == 1:
                error = f"the form that the answer is held to: {type(failure).__name__}"
                return {places[0].key: FoundMask(error=error)}
            return {key: found for place in places for key, found in self._ask([place]).items()}

    def _forbidden(self, places: Sequence[FormPlace]) -> np.ndarray:
        """Returns what the parser does not allow, bool [places, vocab]; of the tokens that end a request, all but where
        the answer could end, whatever the parser takes for its end."""
        words = np.zeros((len(places), -(-self._vocab_size // 32)), np.int32)
        lines = [(place.walk.matcher, line) for line, place in enumerate(places)]
        self._parser.unsafe_compute_mask_ptr(lines, words.ctypes.data, words.strides[0], len(places))
        allowed = np.unpackbits(words.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
        allowed[:, self._eos_token_id] = 0
        for line, place in enumerate(places):
            ends = [token for token in place.end_token_ids if token < self._vocab_size]
            allowed[line, ends] = place.walk.matcher.is_accepting()
        return np.logical_not(allowed)


def _place(slot: "Slot", walk: GrammarWalk, num_outputs: int) -> FormPlace:
    outputs = slot.tokens[slot.prompt_len : slot.prompt_len + num_outputs]
    return FormPlace(walk, outputs, slot.num_known - slot.prompt_len, slot.admitted.stop_token_ids)


def _found(place: FormPlace, forbidden: np.ndarray | None) -> FoundMask:
    try:
        follows = place.walk.check(place.outputs, place.num_sure)
        if forbidden is None or not follows:
            return FoundMask()
        if forbidden.all():
            raise _too_much("the form that the answer is held to allows no token here")
        return FoundMask(forbidden)
    except RequestError as error:
        return FoundMask(error=error.info)


def _too_much(words: str) -> RequestError:
    hint = "make the form simpler: fewer alternatives that begin alike, shorter repetitions"
    return RequestError(words, code="grammar", param="grammar", hint=hint)


def said(matcher: llguidance.LLMatcher) -> str:
    """Returns what it says is wrong, without the state that it shows after that."""
    return str(matcher.get_error()).partition("\n<state>")[0][:SHOWN_CHARS]
