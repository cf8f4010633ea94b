"""How likely drafts are to be right, learnt from those of which it came out.

Of each kind of draft (its source, and how many tokens matched) and each place in it: the share that was right where all
drafts before it were. Old ones count less and less. A request's own record is a factor on top: where text never repeats
itself, short matches are chance, and a request whose drafts are wrong is asked less and less, and comes back slowly.
"""

from typing import NamedTuple

MIN_MATCH = 2  # tokens
KINDS_OF_MATCH = 5  # 2 to 3 tokens, 4 to 7, 8 to 15, 16 to 31, more
MEMORY = 0.98  # what is left of a trial when another follows
PRIOR_TRIALS, PRIOR_CHANCE = 4.0, 0.6  # what is believed of drafts of which none was verified
TRUST_PRIOR = 0.5  # drafts right of as many expected, before a request has a record
TRUST_MEMORY, TRUST_BACK = 0.95, 0.98  # what is left of the record with each row of drafts, and each one not believed


class DraftKind(NamedTuple):
    """source: as `kernels.native.suffix` numbers it. match: class of lengths, the shortest is 0."""

    source: int
    match: int


def kind_of(source: int, num_matched: int) -> DraftKind:
    """Returns the kind of drafts that follow a match of so many tokens, at least `MIN_MATCH`."""
    return DraftKind(source, min(num_matched.bit_length() - MIN_MATCH.bit_length(), KINDS_OF_MATCH - 1))


class Acceptance:
    """most: how many drafts a row may have."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._right: dict[DraftKind, list[float]] = {}
        self._tried: dict[DraftKind, list[float]] = {}
        self._survival: dict[DraftKind, tuple[float, ...]] = {}

    def survival(self, kind: DraftKind) -> tuple[float, ...]:
        """Returns for each place the chance that this draft and all before it are right."""
        found = self._survival.get(kind)
        if found is None:
            found = self._survival[kind] = tuple(self._products(kind))
        return found

    def learn(self, kind: DraftKind, num_drafts: int, num_right: int) -> None:
        """Takes in that of so many drafts the first `num_right` were right."""
        right, tried = self._of(kind)
        for place in range(min(num_right + 1, num_drafts)):
            right[place] = MEMORY * right[place] + (place < num_right)
            tried[place] = MEMORY * tried[place] + 1
        self._survival.pop(kind, None)

    def _of(self, kind: DraftKind) -> tuple[list[float], list[float]]:
        if kind not in self._tried:
            self._right[kind], self._tried[kind] = [0.0] * self._most, [0.0] * self._most
        return self._right[kind], self._tried[kind]

    def _products(self, kind: DraftKind) -> list[float]:
        chance, chances = 1.0, []
        for right, tried in zip(*self._of(kind), strict=True):
            chance *= (right + PRIOR_TRIALS * PRIOR_CHANCE) / (tried + PRIOR_TRIALS)
            chances.append(chance)
        return chances


class Trust:
    """A request's own record: `factor`, by which its drafts are right less often than others of their kind; 1 where
    nothing is known, and at most."""

    __slots__ = ("_expected", "_right")

    def __init__(self) -> None:
        self._right = self._expected = 0.0

    @property
    def factor(self) -> float:
        return min(1.0, (self._right + TRUST_PRIOR) / (self._expected + TRUST_PRIOR))

    def learn(self, expected: float, num_right: int) -> None:
        """expected: how many of the row's drafts should have been right, without this factor."""
        self._right = TRUST_MEMORY * self._right + num_right
        self._expected = TRUST_MEMORY * self._expected + expected

    def recover(self) -> None:
        """Forgets a little: drafts could have been made, and were not believed."""
        self._right *= TRUST_BACK
        self._expected *= TRUST_BACK
