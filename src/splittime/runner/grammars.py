"""Answers that a grammar holds to a form: which tokens may come next, by llguidance's parser (derivatives of regular
expressions under an Earley parser; Microsoft's guidance project).

A grammar is text in llguidance's own form; `text.grammars` writes it. It is compiled once, in whatever thread asks
(`drive.grammar_gate` asks in one of its own, before the request is queued), and the latest are kept. Each request walks
a copy (`form_walk.GrammarWalk`), which follows its outputs: those that are known, and the drafts behind them, of which
the wrong ones are taken back.

The compiler calls itself as deep as a grammar's rules refer to each other, and ends the process where its stack ends:
it has a thread with a stack of its own.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import llguidance

from splittime.core.errors import EngineError, RequestError
from splittime.runner.form_masks import FormMasks
from splittime.runner.form_walk import SHOWN_CHARS, GrammarWalk, said
from splittime.runner.machine import num_cores

log = logging.getLogger("splittime.runner")
MOST_KEPT = 256  # compiled grammars
COMPILER_STACK_BYTES = 256 << 20  # the deepest that fits into `core.sampling.MAX_GRAMMAR_CHARS` took less than 64 MiB
MAX_GRAMMAR_SIZE = 50_000  # in the compiler's units; at most 15 MB and a second
MAX_STEP_ITEMS = 20_000  # of the parser, for a mask: some tens of milliseconds
_starts = threading.Lock()  # the stack's size is the process's, and is set for the start of a thread


class Grammars:
    """The compiled grammars of one model. May be used by several threads.

    tokenizer: returns the tokenizer's JSON; called once, when the first grammar comes. vocab_size: width of the logits.
    """

    def __init__(self, tokenizer: Callable[[], str], vocab_size: int) -> None:
        self._read_tokenizer, self._vocab_size = tokenizer, vocab_size
        self._tokenizer: Any = None
        self._kept: OrderedDict[str, llguidance.LLMatcher | str] = OrderedDict()  # or what the compiler said
        self._lock, self._tokenizer_lock = threading.Lock(), threading.Lock()

    def is_known(self, grammar: str) -> bool:
        """Whether `compile` would answer at once."""
        with self._lock:
            return grammar in self._kept

    def compile(self, grammar: str) -> None:
        """Raises RequestError for a grammar that cannot be. Takes from a millisecond to a second."""
        self._compiled(grammar)

    def walk(self, grammar: str) -> GrammarWalk:
        """Returns a walk that begins. Raises RequestError as `compile` does."""
        if not self.is_known(grammar):
            log.warning("a form is compiled in a step: more than %d others came since its request did", MOST_KEPT)
        return GrammarWalk(self._compiled(grammar))

    def masks(self) -> FormMasks:
        """Returns what looks where its walks are. Raises RequestError for a tokenizer that cannot be read."""
        num_threads = max(1, num_cores() // 2)
        return FormMasks(self._vocab_size, self._known_tokenizer().eos_token, num_threads)

    def _compiled(self, grammar: str) -> llguidance.LLMatcher:
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
        if found is None:
            made = _compile(self._known_tokenizer(), grammar)
            found = said(made) if made.is_error() else made
            self._keep(grammar, found)
        if isinstance(found, str):
            raise RequestError(f"the answer cannot be held to this form: {found}", code="grammar", param="grammar")
        return found

    def _keep(self, grammar: str, made: llguidance.LLMatcher | str) -> None:
        with self._lock:
            self._kept[grammar] = made
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)

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
    limits = llguidance.LLParserLimits(max_grammar_size=MAX_GRAMMAR_SIZE, step_max_items=MAX_STEP_ITEMS)
    made: list[llguidance.LLMatcher] = []
    work = threading.Thread(
        target=lambda: made.append(llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)), name="grammar"
    )
    with _starts:
        before = threading.stack_size(COMPILER_STACK_BYTES)
        try:
            work.start()
        finally:
            threading.stack_size(before)
    work.join()
    if not made:
        raise EngineError("the compiler of forms failed", code="grammar")
    return made[0]
