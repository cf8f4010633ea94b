"""Answers that a grammar holds to a form: which tokens may come next, by llguidance's parser (derivatives of regular
expressions under an Earley parser; Microsoft's guidance project).

A grammar is text in llguidance's own form; `text.grammars` writes it. It is compiled once, in whatever thread asks
(`drive.grammar_gate` asks in one of its own, before the request is queued), and the latest are kept. Each request walks
a copy (`GrammarWalk`), which follows the request's outputs: those that are known, and the drafts behind them, of which
the wrong ones are taken back.

A token that ends a request is no part of a grammar: it may come wherever the answer could end, and nothing else may
come where it must.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np

from splittime.core.errors import EngineError, RequestError

MOST_KEPT = 256  # compiled grammars
SHOWN_CHARS = 500  # of what the compiler says


class GrammarWalk:
    """Where one request's answer stands in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._num_consumed = self._num_sure = 0
        self._words = llguidance.numpy.allocate_token_bitmask(1, vocab_size)

    def allowed(self, outputs: np.ndarray, num_sure: int, end_token_ids: tuple[int, ...]) -> np.ndarray | None:
        """Returns which tokens may follow these outputs, bool [vocab]; None where a draft among them cannot be, so that
        what follows it is of no interest. Raises EngineError where the parser cannot go on.

        outputs: int64 [N]. num_sure: so many of them are known, the others are drafts. end_token_ids: those that end
        the request."""
        is_whole = self._follow(outputs, num_sure)
        if self._matcher.is_error() or self._num_consumed < min(num_sure, len(outputs)):
            words = str(self._matcher.get_error()).partition("\n")[0][:SHOWN_CHARS] or "it does not know this answer"
            raise EngineError(f"the form that the answer is held to: {words}", code="grammar")
        if not is_whole:
            return None
        if self._matcher.is_stopped():
            found = np.zeros(self._vocab_size, dtype=np.uint8)
        else:
            llguidance.numpy.fill_next_token_bitmask(self._matcher, self._words, 0)
            found = np.unpackbits(self._words.view(np.uint8), bitorder="little")[: self._vocab_size]
        if self._matcher.is_accepting():
            found[[token for token in end_token_ids if token < self._vocab_size]] = 1
        if not found.any():
            raise EngineError("the form that the answer is held to allows no token here", code="grammar")
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
        return GrammarWalk(self._compiled(grammar).deep_copy(), self._vocab_size)

    def _compiled(self, grammar: str) -> llguidance.LLMatcher:
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
        if found is None:
            made = llguidance.LLMatcher(self._known_tokenizer(), grammar)
            found = str(made.get_error()).partition("\n<state>")[0][:SHOWN_CHARS] if made.is_error() else made
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
