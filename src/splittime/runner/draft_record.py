"""What is learnt of drafts, by tenant: how likely one is to be right, and whether one more is worth its time.

How fast tokens come shows how many drafts are made, and which are right. A number that is learnt from one tenant's
texts and decides about another's drafts would tell of those texts, to whoever measures his own answers. So what is
learnt of texts and outlives a request belongs to a tenant (the request's `cache_salt`).

A step of the model gives each of its requests a token. A draft that is right with a chance p adds p tokens, and costs a
row of the draft model's step and a row of the model's. So drafts are made one of each request at a time, while the step
that will verify them is expected to give more tokens for its time with one more than without; the first ones must make
it better by `MARGIN`.

When a request comes, the draft model has computed none of its text. To compute it is worth it if what is left of the
answer is expected to save more time than that takes. How long answers are, and how often drafts are right, is learnt by
tenant (`draft_record`); an answer that is longer than most is expected to go on for as long as it has.

Of each kind of draft (its source, and how many tokens matched) and each place in it: the share that was right where all
drafts before it were. Old ones count less and less. A request's own record is a factor on top: where text never repeats
itself, short matches are chance, and a request whose drafts are wrong is asked less and less, and comes back slowly.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from splittime.core.row_costs import RowCosts
from splittime.core.step import StepPlan, StepResult
from splittime.runner.config import MOST_TENANTS

EDGES = (0.3, 0.5, 0.7, 0.85, 0.95)  # of classes of the draft model's own probability
PRIOR_TRIALS, PRIOR_CHANCE = 4.0, 0.8  # of a class: what is believed before drafts were verified, so that some are
MEMORY = 0.98  # what is left of a trial when another of its class follows
FADES = 0.995  # what is left of all trials when some steps had no drafts: they are tried again
VERIFIED_WEIGHT = 0.05  # of the newest row with drafts, in which share of them is verified
ANSWER_TOKENS = 128.0  # how long answers are, before one has ended
ANSWER_WEIGHT = 0.1  # of the newest answer


class Confidence:
    """How often drafts were right where all before them were, by how sure the draft model was."""

    def __init__(self) -> None:
        self._right = [0.0] * (len(EDGES) + 1)
        self._tried = [0.0] * (len(EDGES) + 1)

    def chance(self, probability: float) -> float:
        """Returns how likely a draft to which the draft model gave this probability is to be right."""
        return self._share(*self._of(probability))

    @property
    def mean(self) -> float:
        """Returns how likely a draft is to be right that is not made yet."""
        return self._share(sum(self._right), sum(self._tried))

    def learn(self, probability: float, is_right: bool) -> None:
        kind = _class_of(probability)
        self._right[kind] = MEMORY * self._right[kind] + is_right
        self._tried[kind] = MEMORY * self._tried[kind] + 1

    def fade(self) -> None:
        self._right = [FADES * one for one in self._right]
        self._tried = [FADES * one for one in self._tried]

    def _of(self, probability: float) -> tuple[float, float]:
        kind = _class_of(probability)
        return self._right[kind], self._tried[kind]

    @staticmethod
    def _share(right: float, tried: float) -> float:
        return (right + PRIOR_TRIALS * PRIOR_CHANCE) / (tried + PRIOR_TRIALS)


def _class_of(probability: float) -> int:
    return sum(probability >= edge for edge in EDGES)


class TenantRecord:
    """verified: the share of the drafts that was verified. num_idle: steps in a row in which its requests could have
    had drafts, and none had."""

    def __init__(self) -> None:
        self.confidence, self.verified, self.num_idle = Confidence(), 1.0, 0
        self._answer_tokens = ANSWER_TOKENS

    @property
    def chance(self) -> float:
        """Returns how likely a draft that is not made yet is to be verified and right."""
        return self.verified * self.confidence.mean

    def learn_verified(self, num_verified: int, num_drafts: int) -> None:
        """Takes in how many of a row's drafts the scheduler had verified."""
        self.verified += VERIFIED_WEIGHT * (min(1.0, num_verified / num_drafts) - self.verified)

    def learn_answer(self, num_tokens: int) -> None:
        """Takes in how long an answer was."""
        self._answer_tokens += ANSWER_WEIGHT * (num_tokens - self._answer_tokens)

    def num_left(self, num_outputs: int, num_allowed: int) -> float:
        """Returns how many tokens a request that has so many outputs, and may have so many more, is expected to get."""
        return min(num_allowed, max(self._answer_tokens - num_outputs, num_outputs))

    def forgive(self) -> None:
        """Forgets a little of what speaks against drafts, so that they are tried again, seldom."""
        self.confidence.fade()
        self.verified += (1 - FADES) * (1 - self.verified)


Learnt = TypeVar("Learnt")


class ByTenant(Generic[Learnt]):
    """make: what is believed of a tenant of whom nothing is known. most: tenants who are remembered, those who asked
    last."""

    def __init__(self, make: Callable[[], Learnt], most: int = MOST_TENANTS) -> None:
        self._make, self._most = make, most
        self._learnt: OrderedDict[str, Learnt] = OrderedDict()

    def of(self, salt: str) -> Learnt:
        """Returns what is learnt of this tenant, who asks now; one who was forgotten begins anew."""
        found = self._learnt.get(salt)
        if found is None:
            found = self._learnt[salt] = self._make()
        self._learnt.move_to_end(salt)
        if len(self._learnt) > self._most:
            self._learnt.popitem(last=False)
        return found


MARGIN = 0.03
LEAST_TEXT = 16  # tokens that a step of texts computes at least, and of which their price is learnt


class DraftingCosts:
    """model, draft: how long steps of either take, by their rows. text_ns: what a token of a text takes the draft
    model."""

    def __init__(self) -> None:
        self.model, self.draft = RowCosts(), RowCosts()
        self.text_ns = 1.0

    def learn_model(self, plan: StepPlan, result: StepResult) -> None:
        """Takes in a step, if it had nothing but decode rows."""
        if plan.rows and all(len(row.token_ids) == 1 and row.num_samples for row in plan.rows):
            numbers = [len(row.draft_token_ids) for row in plan.rows]
            took_ns = result.device_ns + result.sample_ns
            self.model.learn(len(numbers), took_ns, sum(numbers), sum(map(bool, numbers)))

    def learn_text(self, num_tokens: int, ns: int) -> None:
        """Takes in that the draft model has computed so many tokens of texts in one step."""
        if num_tokens >= LEAST_TEXT:
            self.text_ns = 0.5 * (self.text_ns + ns / num_tokens)

    def saved_ns(self, num_rows: int, chance: float, most: int) -> float:
        """Returns the time that drafts save of a request's token in steps of so many rows; 0 where none pays."""
        return self.model.expected_ns(num_rows) / num_rows * (1 - 1 / self.gain(num_rows, chance, most))

    def gain(self, num_rows: int, chance: float, most: int) -> float:
        """Returns tokens for a step's time with drafts over without, where each row has as many as pay, `most` at most,
        and each draft is right with this chance; 1 where none pays."""
        step = StepWorth(self, num_rows)
        alone = step.tokens / step.ns
        survival = 1.0
        for number in range(most):
            survival *= chance
            if not step.gains(survival * num_rows, num_rows, MARGIN if number == 0 else 0.0):
                break
            step.add(survival * num_rows, num_rows)
        return step.tokens / step.ns / alone


class StepWorth:
    """What the step that verifies drafts is worth: tokens that it is expected to give, and its time, with that in which
    its drafts are made."""

    def __init__(self, costs: DraftingCosts, num_rows: int) -> None:
        self._costs = costs
        self.tokens, self.ns = float(num_rows), costs.model.expected_ns(num_rows)

    def gains(self, more_tokens: float, num_drafts: int, margin: float = 0.0) -> bool:
        """Returns whether as many drafts more, which are expected to give so many tokens, make it better by
        `margin`."""
        better = (self.tokens + more_tokens) / (self.ns + self._more_ns(num_drafts))
        return better > (1 + margin) * self.tokens / self.ns

    def add(self, more_tokens: float, num_drafts: int) -> None:
        self.ns += self._more_ns(num_drafts)
        self.tokens += more_tokens

    def _more_ns(self, num_drafts: int) -> float:
        return self._costs.draft.expected_ns(num_drafts) + num_drafts * self._costs.model.ns_per_draft


MIN_MATCH = 2  # tokens
KINDS_OF_MATCH = 5  # 2 to 3 tokens, 4 to 7, 8 to 15, 16 to 31, more
UNVERIFIED_TRIALS, UNVERIFIED_CHANCE = 4.0, 0.6  # what is believed of drafts of which none was verified
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
        if kind not in self._survival:
            self._survival[kind] = tuple(self._products(kind))
        return self._survival[kind]

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
            chance *= (right + UNVERIFIED_TRIALS * UNVERIFIED_CHANCE) / (tried + UNVERIFIED_TRIALS)
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
