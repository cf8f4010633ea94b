"""Answers that a grammar holds to a form: which tokens may come next, by llguidance's parser (derivatives of regular
expressions under an Earley parser; Microsoft's guidance project).

A grammar is text in llguidance's own form; `text.grammars` writes it. It is compiled once, in whatever thread asks
(`drive.grammar_gate` asks in one of its own, before the request is queued), and the latest are kept. Each request walks
a copy (`GrammarWalk`), which follows the request's outputs: those that are known, and the drafts behind them, of which
the wrong ones are taken back.

A token that ends a request is no part of a grammar: it may come wherever the answer could end, and nothing else may
come where it must.

The compiler calls itself as deep as a grammar's rules refer to each other, and ends the process where its stack ends:
it has a thread with a stack of its own.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np

from splittime.core.errors import EngineError, RequestError

log = logging.getLogger("splittime.runner")
MOST_KEPT = 256  # compiled grammars
SHOWN_CHARS = 500  # of what the compiler says
COMPILER_STACK_BYTES = 256 << 20  # the deepest that fits into `core.sampling.MAX_GRAMMAR_CHARS` took less than 64 MiB
MAX_GRAMMAR_SIZE = 50_000  # in the compiler's units; at most 15 MB and a second
MAX_STEP_ITEMS = 20_000  # of the parser, for a mask: some tens of milliseconds
_starts = threading.Lock()  # the stack's size is the process's, and is set for the start of a thread


class GrammarWalk:
    """Where one request's answer stands in its grammar. begin: the compiled grammar, of which it walks copies."""

    def __init__(self, begin: llguidance.LLMatcher, vocab_size: int, eos_token_id: int) -> None:
        self._begin, self._vocab_size, self._eos_token_id = begin, vocab_size, eos_token_id
        self._words = llguidance.numpy.allocate_token_bitmask(1, vocab_size)
        self._start_again()

    def allowed(self, outputs: np.ndarray, num_sure: int, end_token_ids: tuple[int, ...]) -> np.ndarray | None:
        """Returns which tokens may follow these outputs, bool [vocab]; None where a draft among them cannot be, so that
        what follows it is of no interest. Raises RequestError where the parser cannot go on.

        outputs: int64 [N]. num_sure: so many of them are known, the others are drafts. end_token_ids: those that end
        the request."""
        is_whole = self._follow(outputs, num_sure)
        found = self._next_tokens(end_token_ids) if is_whole else None
        if self._matcher.is_error() and len(outputs) > num_sure:
            self._start_again()  # a draft was too much for the parser: the answer itself may not be
            return None
        if self._matcher.is_error() or self._num_consumed < min(num_sure, len(outputs)):
            words = _said(self._matcher) or "it does not know this answer"
            raise _too_much(f"the form that the answer is held to: {words}")
        if found is not None and not found.any():
            raise _too_much("the form that the answer is held to allows no token here")
        return found

    def _start_again(self) -> None:
        self._matcher, self._num_consumed, self._num_sure = self._begin.deep_copy(), 0, 0

    def _next_tokens(self, end_token_ids: tuple[int, ...]) -> np.ndarray:
        """Returns what the parser allows; of the tokens that end a request, all where the answer could end, else none,
        whatever the parser takes for its end."""
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._words, 0)
        found = np.unpackbits(self._words.view(np.uint8), bitorder="little")[: self._vocab_size]
        found[self._eos_token_id] = 0
        found[[token for token in end_token_ids if token < self._vocab_size]] = self._matcher.is_accepting()
        return found.view(np.bool_)

    def _follow(self, outputs: np.ndarray, num_sure: int) -> bool:
        """Go to behind these outputs. Returns whether the grammar has such a place."""
        keep = min(self._num_sure, len(outputs))
        if self._num_consumed > keep:
            self._matcher.rollback(self._num_consumed - keep)
        ahead = outputs[keep:].tolist()
        num_more = self._matcher.try_consume_tokens(ahead) if ahead else 0
        self._num_consumed = keep + num_more
        self._num_sure = min(self._num_consumed, max(keep, num_sure))
        return num_more == len(ahead)


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
        begin = self._compiled(grammar)
        return GrammarWalk(begin, self._vocab_size, self._known_tokenizer().eos_token)

    def _compiled(self, grammar: str) -> llguidance.LLMatcher:
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
        if found is None:
            made = _compile(self._known_tokenizer(), grammar)
            found = _said(made) if made.is_error() else made
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


def _too_much(said: str) -> RequestError:
    hint = "make the form simpler: fewer alternatives that begin alike, shorter repetitions"
    return RequestError(said, code="grammar", param="grammar", hint=hint)


def _said(matcher: llguidance.LLMatcher) -> str:
    """Returns what it says is wrong, without the state that it shows after that."""
    return str(matcher.get_error()).partition("\n<state>")[0][:SHOWN_CHARS]
