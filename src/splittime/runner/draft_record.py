"""What a tenant's answers have taught: how often a draft model was right about them, and how long they are.

It is kept by tenant (`by_tenant`), so that no tenant's texts decide about another's drafts.
"""

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
