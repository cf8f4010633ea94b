"""Answers that a grammar holds to a form: which tokens may come next, by llguidance's parser (derivatives of regular
expressions under an Earley parser; Microsoft's guidance project).

A grammar is text in llguidance's own form; `text.grammars` writes it. A stranger wrote the form, so it is tried first
in a process with limits (`form_process`), in whatever thread asks (`drive.gates` asks in some of its own, before
the request is queued). One that is small by its text (`form_process`) and was quick there is compiled once more here,
and each request walks a copy (`form_walk.GrammarWalk`), which follows its outputs: those that are known, and the drafts
behind them, of which the wrong ones are taken back. Any other walks in its process (`far_forms`), and so does one that
takes too much here after all: its requests go on there (`FormMasks.take`).

Forms are kept for who asked for them, by what they weigh (`core.shares`); what failed is kept too, as its words.

What may come hangs on the tokens before, and on nothing that the model computes. So the runner looks as soon as they
are known (`look_ahead`); what takes longer than to have a thread do it a thread does, while the step ends, the next is
planned, and the model computes. The sampler takes what was found (`take`), and waits for what is left.

Where a form leaves only one token, or several of which each leaves one, these are known before anything is computed
(`forced`). They are told as drafts, which cannot be wrong: the request's next row has them all, and they take no step
of their own. What the parser said of them is kept, and until they have come it is not asked again.

A token that ends a request is no part of a grammar: it may come wherever the answer could end, and nothing else may
come where it must.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import llguidance
import numpy as np

from splittime.core.errors import EngineError, ErrorInfo, Refused, RequestError, error_from_info
from splittime.core.forked import ForkLimits
from splittime.core.shares import KeptByOwner
from splittime.core.this_process import num_cores
from splittime.kernels.draw import one_bit
from splittime.runner.far_forms import FarForm, FarForms, FarWalk, FormProcess, FormProcesses, refused
from splittime.runner.form_process import LIMITS, STACK_BYTES, MaskLimits, compiled
from splittime.runner.form_walk import (
    INTERRUPTS,
    SHOWN_CHARS,
    FormLooks,
    FormPlace,
    FoundMask,
    FoundMasks,
    GrammarWalk,
    Key,
    MaskLines,
    key_of,
)

if TYPE_CHECKING:
    from splittime.runner.slot import Slot


QUICK_NS = 1_000_000  # a thread that finds less, for a step, costs more by waking, and by taking turns, than it saves
LATE_NS = QUICK_NS // 2  # which a step waits for masks, of all its answers together
LATE_ALONE_NS = 5 * QUICK_NS  # where all of its answers wait for one


class FormMasks(FormLooks):
    """The masks of one model's answers. on_found: is told the id of a request whose mask was late, when it is there,
    unless the request has lost its slot. None: no step goes on without one."""

    def __init__(
        self, vocab_size: int, eos_token_id: int, num_threads: int, on_found: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(vocab_size, eos_token_id, num_threads)
        self._thread = ThreadPoolExecutor(1, "masks")
        self._on_found = on_found
        self._asked: tuple[Sequence[Slot], Sequence[int], dict[int, Key]] = (), (), {}  # last, and by line
        self._found: FoundMasks = {}
        self._begun: dict[Key, Future[FoundMasks]] = {}
        self._waited_ns = 0
        self._lines = MaskLines(0, vocab_size, eos_token_id)  # of `_go_on`

    def begin(self, slots: "Sequence[Slot]", counts: Sequence[int]) -> None:
        """Starts to look behind so many outputs of those of these requests that are held to a form, where nobody looks
        yet. Drafts among the outputs stay as they are until `take`."""
        keys, new = dict[int, Key](), []
        for line, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            if slot.grammar is not None:
                outputs, num_sure = _outputs(slot, count)
                keys[line] = key = key_of(slot.grammar, outputs, num_sure)
                if slot.late_mask is not None and slot.late_mask[0] == key:
                    self._begun[key] = slot.late_mask[1]
                elif key not in self._found:
                    new.append(FormPlace(slot.grammar, outputs, num_sure, slot.admitted.stop_token_ids))
        self._submit(new)
        self._asked = slots, counts, keys

    def _submit(self, places: Sequence[FormPlace]) -> None:
        """Has the thread look at those of these places where nobody looks yet and what may come is not known."""
        new = [place for place in places if place.key not in self._found and place.key not in self._begun]
        self._found |= (known := self._known(new))
        new = [place for place in new if place.key not in known]
        if near := [place for place in new if isinstance(place.walk, GrammarWalk)]:
            self._look_beside(near)
        if len(near) < len(new):
            self._begun |= {
                place.key: place.walk.look(place) for place in new if not isinstance(place.walk, GrammarWalk)
            }

    def _look_beside(self, places: Sequence[FormPlace]) -> None:
        """Has the thread look: who has few of these places goes first, and waits for nobody who has more."""
        of_owner: dict[str, list[FormPlace]] = {}
        for place in places:
            of_owner.setdefault(place.walk.owner, []).append(place)
        for own in sorted(of_owner.values(), key=len):
            looking = self._thread.submit(self._look_together, own)
            self._begun |= dict.fromkeys([place.key for place in own], looking)

    def look_ahead(self, slots: "Sequence[Slot]", finds_forced: bool) -> list[tuple[int, ...]]:
        """Returns what must follow what is known of each of these requests, which are held to a form, and begins to
        look behind that; where this is quick, it has looked. finds_forced: otherwise it takes it that nothing must, as
        it does of those whose turn does not come in time."""
        end_ns = time.perf_counter_ns() + QUICK_NS
        far = [slot for slot in slots if not isinstance(slot.grammar, GrammarWalk)]
        if far:
            self._submit([_place(slot, slot.num_known - slot.prompt_len) for slot in far])
            near = [slot for slot in slots if isinstance(slot.grammar, GrammarWalk)]
            of_near = dict(zip(near, self.look_ahead(near, finds_forced), strict=True))
            return [of_near.get(slot, ()) for slot in slots]
        forced = self._go_on(slots, end_ns, finds_forced)
        if left := [line for line, told in enumerate(forced) if told is None]:
            places = [_place(slots[line], slots[line].num_known - slots[line].prompt_len) for line in left]
            for at, line in enumerate(left):
                if finds_forced and time.perf_counter_ns() < end_ns and (told := self._forced(places[at], end_ns)):
                    forced[line], places[at] = told, places[at].behind(told)
            self._submit(self._look_until(places, end_ns))
        return [told or () for told in forced]

    def _go_on(self, slots: "Sequence[Slot]", end_ns: int, finds_forced: bool) -> list[tuple[int, ...] | None]:
        """Looks where walks go on (`GrammarWalk.go_on`), if that is likely to be done by then, and while it is. Returns
        what must come; None where it has not looked."""
        told: list[tuple[int, ...] | None] = [None] * len(slots)
        if time.perf_counter_ns() + len(slots) * self._look_ns > end_ns:
            return told
        lines, num_tried = self._room(len(slots)), 0
        if not self._has_walks_by(end_ns):
            return told
        try:
            begin_ns = now_ns = time.perf_counter_ns()  # the thread may have had the walks until now
            for line, slot in enumerate(slots):
                told[line], num_tried = self._go_on_one(slot, lines, line, finds_forced), line + 1
                if (now_ns := time.perf_counter_ns()) > end_ns:
                    break
        finally:
            self._walking.release()
        if told.count(None) < len(told):  # else there were no looks
            self._learn((now_ns - begin_ns) // num_tried, by_thread=False)
        return told

    def _go_on_one(self, slot: "Slot", lines: "MaskLines", line: int, finds_forced: bool) -> tuple[int, ...] | None:
        """Goes on with a walk, and notes what may come there, in this line. Returns what must come before. None where
        it does not go on so, or nothing may come, or the parser makes a mistake: who looks there next hears of it."""
        walk, end_token_ids = _walk(slot), slot.admitted.stop_token_ids
        try:
            forced = walk.go_on(slot.tokens[slot.prompt_len : slot.num_known], end_token_ids, finds_forced)
            if forced is None:
                return None
            lines.ask(line, walk.matcher)
            took = lines.put_ends(line, walk.matcher, end_token_ids)
            if (took and not lines.words[line].any()) or walk.matcher.is_error():
                return None
        except INTERRUPTS:
            raise
        except BaseException:  # of whatever kind the parser has
            return None
        self._note(slot, forced, lines.words[line])
        return forced

    def _room(self, count: int) -> "MaskLines":
        """Returns so many lines, which are those of before if nobody needs them."""
        if self._found or len(self._lines.words) < count:
            self._lines = MaskLines(count, self._vocab_size, self._eos_token_id)
        return self._lines

    def _note(self, slot: "Slot", forced: tuple[int, ...], allowed: np.ndarray) -> None:
        """Behind what is known these tokens must come, and then what is allowed may."""
        walk, num_outputs = _walk(slot), slot.num_known - slot.prompt_len
        for count, token in enumerate(forced):
            self._found[walk, num_outputs + count, forced[:count]] = FoundMask(one_bit(token, self._vocab_size))
        self._found[walk, num_outputs + len(forced), forced] = FoundMask(allowed)

    def _look_until(self, places: Sequence[FormPlace], end_ns: int) -> Sequence[FormPlace]:
        """Looks at these places if that is likely to be done by then, and while it is. Returns the others."""
        now_ns, likely_ns = time.perf_counter_ns(), len(places) * self._look_ns
        for at, place in enumerate(places):
            if now_ns + likely_ns > end_ns or not self._has_walks_by(end_ns):
                return places[at:]
            try:
                self._found |= self._looked([place], None)
            finally:
                self._walking.release()
            likely_ns, now_ns = 0, time.perf_counter_ns()
        return ()

    def _forced(self, place: FormPlace, end_ns: int) -> tuple[int, ...]:
        """Returns the tokens that must follow these outputs, which are known, up to one that ends the request; none
        where the walks are not free by then."""
        if not self._has_walks_by(end_ns):
            return ()
        try:
            return tuple(place.walk.find_forced(place))
        except INTERRUPTS:
            raise
        except BaseException:  # of whatever kind the parser has: who looks there next hears of it
            return ()
        finally:
            self._walking.release()

    def take(self, slots: "Sequence[Slot]", counts: Sequence[int]) -> dict[int, np.ndarray]:
        """Returns by line which tokens may come there, as in `sampler.Allowed`, and forgets what was found elsewhere. A
        request whose answer cannot go on fails (`Slot.end_behind`), and has no line."""
        allowed, begin_ns = {}, time.monotonic_ns()
        if self._asked[:2] != (slots, counts):
            self.begin(slots, counts)
        keys = self._asked[2]
        is_late = self._late(keys.values(), len(keys) == len(slots)) if self._begun else ()
        for line, key in keys.items():
            if key in is_late:
                self._sit_out(slots[line], counts[line], key)
                continue
            found = self._found.get(key) or self._begun[key].result()[key]
            if found.error is not None and (elsewhere := self._go_elsewhere(slots[line], counts[line])):
                if self._on_found is not None:
                    self._sit_out(slots[line], counts[line], elsewhere)
                    continue
                found = self._begun[elsewhere].result()[elsewhere]
            if found.allowed is None:
                slots[line].end_behind(counts[line], found.error)
            else:
                allowed[line] = found.allowed
        self.forget()
        self._waited_ns += time.monotonic_ns() - begin_ns
        return allowed

    def _go_elsewhere(self, slot: "Slot", num_outputs: int) -> Key | None:
        """Has a request whose parser gave up here, behind what is known, go on elsewhere. Returns the place that is
        looked at there; None where there is none."""
        walk = slot.grammar
        if (
            not isinstance(walk, GrammarWalk)
            or walk.elsewhere is None
            or num_outputs > slot.num_known - slot.prompt_len
        ):
            return None
        slot.grammar = goes_on = walk.elsewhere()
        place = _place(slot, num_outputs)
        self._begun[place.key] = goes_on.look(place)
        return place.key

    def _late(self, keys: Iterable[Key], is_alone: bool) -> set[Key]:
        """Returns those of these masks for which the step does not wait. is_alone: nobody in it waits for none."""
        keys = [key for key in keys if key not in self._found]
        looks = {self._begun[key] for key in keys}
        if not looks or self._on_found is None:
            return set()
        _, late = wait(looks, (LATE_ALONE_NS if is_alone else LATE_NS) / 1e9)
        return {key for key in keys if self._begun[key] in late}

    def _sit_out(self, slot: "Slot", num_outputs: int, key: Key) -> None:
        """Nothing comes behind so many outputs in this step; what was guessed so far counts as wrong."""
        assert self._on_found is not None
        if num_outputs > slot.num_known - slot.prompt_len:
            slot.end_behind(num_outputs, None)
            return
        request_id, on_found, look = slot.admitted.request_id, self._on_found, self._begun[key]
        slot.is_late, slot.late_mask = True, (late := (key, look))
        look.add_done_callback(lambda _: on_found(request_id) if slot.late_mask is late else None)

    def forget(self) -> None:
        """Forgets what was found and begun, and with it the walks of requests that have ended."""
        self._asked, self._found = ((), (), {}), {}
        self._begun.clear()

    def take_waited_ns(self) -> int:
        """Returns how long `take` waited since this was asked last."""
        waited_ns, self._waited_ns = self._waited_ns, 0
        return waited_ns


def _place(slot: "Slot", num_outputs: int) -> FormPlace:
    assert slot.grammar is not None, "it is held to no form"
    return FormPlace(slot.grammar, *_outputs(slot, num_outputs), slot.admitted.stop_token_ids)


def _outputs(slot: "Slot", num_outputs: int) -> tuple[np.ndarray, int]:
    """Returns so many of a request's outputs, and how many are known."""
    return slot.tokens[slot.prompt_len : slot.prompt_len + num_outputs], slot.num_known - slot.prompt_len


def _walk(slot: "Slot") -> GrammarWalk:
    assert isinstance(slot.grammar, GrammarWalk), "its form walks elsewhere, or it is held to none"
    return slot.grammar


log = logging.getLogger("splittime.runner")
SLOW_NS = 20_000_000  # of a mask: a form whose slowest took more of a processor when it was tried walks in its process
MOST_GROWN_BYTES = 1 << 20  # when it was tried, likewise
MOST_KEPT, MOST_KEPT_BYTES, MOST_BYTES_OF_OWNER = 4096, 256 << 20, 128 << 20
LEAST_KEPT_BYTES = 4096  # of what is kept of any form, beside its text
NEAR = MaskLimits(1_000, 500_000, 20_000)  # some 10 ms of a mask, and 15 MB: who needs more goes on in a process
LEAST_NEAR_BYTES = 512 << 10  # of a form that walks here
WALKED_BYTES = 64 << 10  # what a walk may leave behind in a form that is kept, which others share
MOST_WALKS = 256  # of a form that was compiled once: for who comes then it is compiled anew, and what they left is gone
NOT_AHEAD = RequestError(
    "the answer cannot be held to this form: its tokens may take long to find, and all would wait for them",
    code="grammar",
    param="grammar",
    hint="make the form simpler, or start the server without --async-scheduling",
)
FORGOTTEN = Refused("more forms came than are kept, and this one is lost", reason="grammars_queue_full")
_starts = threading.Lock()  # the stack's size is the process's, and is set for the start of a thread


class NearForm:
    """A form that walks here. num_bytes: when it was compiled."""

    def __init__(self, begin: llguidance.LLMatcher, num_bytes: int) -> None:
        self.begin, self.num_bytes, self.num_walks = begin, num_bytes, 0

    @property
    def is_worn(self) -> bool:
        """Returns whether so many have walked it that it is to be compiled anew; who was let in before that still
        may."""
        return self.num_walks >= MOST_WALKS


class Grammars:
    """The compiled grammars of one model. May be used by several threads.

    tokenizer: returns the tokenizer's JSON; called once, when the first grammar comes. vocab_size: width of the logits.
    is_ahead: steps are planned ahead, so that all wait for each mask: forms that would walk in a process are refused.
    """

    def __init__(
        self, tokenizer: Callable[[], str], vocab_size: int, limits: ForkLimits = LIMITS, is_ahead: bool = False
    ) -> None:
        self._read_tokenizer, self._vocab_size, self._is_ahead = tokenizer, vocab_size, is_ahead
        self._tokenizer: Any = None
        self._tokenizer_lock = threading.Lock()
        self._processes = FormProcesses(tokenizer, vocab_size, limits)
        self.far = FarForms(self._processes)
        self.kept = KeptByOwner[NearForm | FarForm | ErrorInfo](
            MOST_KEPT, MOST_KEPT_BYTES, MOST_BYTES_OF_OWNER, is_by_use=True
        )
        self._lates: WeakValueDictionary[tuple[str, str], FarForm] = WeakValueDictionary()
        self._on_found: Callable[[str], None] | None = None

    def tell_found(self, on_found: Callable[[str], None]) -> None:
        """From now on no step waits long for a mask: a request whose mask is late sits steps out, and this is told its
        id when the mask is there."""
        self._on_found = on_found

    def is_known(self, grammar: str, owner: str = "") -> bool:
        """Returns whether `compile` would answer at once. owner: the tenant who asks, for whom it is kept."""
        return self._found(grammar, owner) is not None

    def compile(self, grammar: str, owner: str = "", is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Raises RequestError for a grammar that cannot be. Takes from some milliseconds to some seconds. is_wanted:
        where it says no, this ends soon, whatever it was doing."""
        found = self._found(grammar, owner)
        if found is None:
            found, num_bytes = self._made(grammar, owner, is_wanted)
            self._keep(owner, grammar, found, num_bytes)
        if isinstance(found, ErrorInfo):
            raise error_from_info(found)

    def walk(self, grammar: str, owner: str = "") -> GrammarWalk | FarWalk:
        """Returns a walk that begins, at once: what is not kept any more its first look has compiled. Raises
        RequestError where it is known that it cannot be."""
        form = self.kept.get(owner, grammar) or (FORGOTTEN.info if self._is_ahead else self._late(grammar, owner))
        if isinstance(form, ErrorInfo):
            raise error_from_info(form)
        if isinstance(form, FarForm):
            return form.walk()
        self._note_walk(form, grammar, owner)
        elsewhere = None if self._is_ahead else partial(self._go_elsewhere, grammar, owner)
        return GrammarWalk(form.begin, owner, elsewhere)

    def _go_elsewhere(self, grammar: str, owner: str) -> FarWalk:
        """Returns a walk of a form that takes more than it may here: from now on all of its walks are elsewhere."""
        form = self._late(grammar, owner)
        self._keep(owner, grammar, form)
        return form.walk()

    def _late(self, grammar: str, owner: str) -> FarForm:
        """Returns a form that is not kept, one for all who walk it at the time."""
        form = self._lates.get((owner, grammar))
        if form is None:
            form = self._lates[owner, grammar] = FarForm(grammar, owner, self.far)
        return form

    def _note_walk(self, form: NearForm, grammar: str, owner: str) -> None:
        form.num_walks += 1
        if form.num_walks % 16 == 0:  # not each time: this looks through all that are kept
            self._keep(owner, grammar, form, form.num_bytes + form.num_walks * WALKED_BYTES)

    def _keep(self, owner: str, grammar: str, form: NearForm | FarForm | ErrorInfo, num_bytes: int = 0) -> None:
        self.kept.put(owner, grammar, form, max(num_bytes, 0) + len(grammar) + LEAST_KEPT_BYTES)

    def masks(self) -> FormMasks:
        """Returns what looks where its walks are. Raises RequestError for a tokenizer that cannot be read."""
        num_threads = max(1, num_cores() // 2)
        return FormMasks(self._vocab_size, self._known_tokenizer().eos_token, num_threads, self._on_found)

    def close(self) -> None:
        """Ends all processes."""
        self._processes.close()

    def _found(self, grammar: str, owner: str) -> NearForm | FarForm | ErrorInfo | None:
        found = self.kept.get(owner, grammar)
        return None if isinstance(found, NearForm) and found.is_worn else found

    def _made(
        self, grammar: str, owner: str, is_wanted: Callable[[], bool]
    ) -> tuple[NearForm | FarForm | ErrorInfo, int]:
        """Returns the form, or why there is none, and what it weighs here."""
        tokenizer = self._known_tokenizer()
        process = self._processes.start()
        try:
            tried = process.compile(grammar, is_wanted)
        except RequestError as error:
            return error.info, 0
        if tried.said:
            return refused(tried.said).info, 0
        if not tried.is_small or tried.slowest_ns > SLOW_NS or tried.num_grown_bytes > MOST_GROWN_BYTES:
            return self._far(grammar, owner, process, is_wanted), 0
        begin = _compile(tokenizer, grammar)
        if begin.is_error():
            return self._far(grammar, owner, process, is_wanted), 0
        process.end()
        num_bytes = max(tried.num_bytes, LEAST_NEAR_BYTES)
        return NearForm(begin, num_bytes), num_bytes

    def _far(
        self, grammar: str, owner: str, process: FormProcess, is_wanted: Callable[[], bool]
    ) -> FarForm | ErrorInfo:
        if self._is_ahead:
            return NOT_AHEAD.info
        form = FarForm(grammar, owner, self.far, process)
        self.far.begin(form, is_wanted)
        return form

    def _known_tokenizer(self) -> Any:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = llguidance.LLTokenizer(self._read_tokenizer(), n_vocab=self._vocab_size)
                except Exception as error:  # of whatever kind the library has for a tokenizer that it cannot read
                    raise RequestError(
                        f"this model's tokenizer cannot hold answers to a form: {str(error)[:SHOWN_CHARS]}",
                        code="grammar",
                        param="grammar",
                        hint="ask for the form in the prompt",
                    ) from None
        return self._tokenizer


def _compile(tokenizer: Any, grammar: str) -> llguidance.LLMatcher:
    """Compiles in a thread with a stack of its own, and waits for it."""
    made: list[llguidance.LLMatcher] = []
    work = threading.Thread(target=lambda: made.append(compiled(tokenizer, grammar, NEAR)), name="grammar")
    with _starts:
        before = threading.stack_size(STACK_BYTES)
        try:
            work.start()
        finally:
            threading.stack_size(before)
    work.join()
    if not made:
        raise EngineError("the compiler of forms failed", code="grammar")
    return made[0]
