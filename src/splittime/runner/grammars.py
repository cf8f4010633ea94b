"""Answers that a grammar holds to a form: which tokens may come next, by llguidance's parser (derivatives of regular
expressions under an Earley parser; Microsoft's guidance project).

A grammar is text in llguidance's own form; `text.grammars` writes it. A stranger wrote the form, so it is tried first
in a process with limits (`form_process`), in whatever thread asks (`drive.grammar_gate` asks in some of its own, before
the request is queued). One that is small by its text (`form_size`) and was quick there is compiled once more here, and
each request walks a copy (`form_walk.GrammarWalk`), which follows its outputs: those that are known, and the drafts
behind them, of which the wrong ones are taken back. Any other walks in its process (`far_forms`), and so does one that
takes too much here after all: its requests go on there (`FormMasks.take`).

Forms are kept for who asked for them, by what they weigh (`core.kept_by_owner`); what failed is kept too, as its words.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import llguidance

from splittime.core.allowed import num_cores
from splittime.core.errors import EngineError, ErrorInfo, Refused, RequestError, error_from_info
from splittime.core.forked import ForkLimits
from splittime.core.kept_by_owner import KeptByOwner
from splittime.runner.far_forms import FarForm, FarForms, FarWalk
from splittime.runner.form_masks import FormMasks
from splittime.runner.form_process import LIMITS, STACK_BYTES, MaskLimits, compiled
from splittime.runner.form_walk import SHOWN_CHARS, GrammarWalk
from splittime.runner.form_workers import FormProcess, FormProcesses, refused

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
