"""Where answers stand in the grammars that hold them, and what must follow there."""

from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from typing import Any, Protocol

import llguidance
import numpy as np

from splittime.core.errors import RequestError

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
