"""How long a step takes by the number of its decode rows: a line, fitted to the latest steps that had no other rows.

A row with drafts costs a step more than as many rows without: it is widened, told and settled. That is learnt apart
from the line, from what steps with such rows take beyond it.

Both columns decide by it about drafts: the scheduler, how many of them the next step verifies; a draft model, how many
are worth making. Steps with as many rows as the mean change the line's height alone, and before steps have differed a
prior says how steep it is.
"""

MEMORY = 0.97  # what is left of a step when another follows
LEAST_OFF = 0.5  # rows by which a step must differ from the mean to tell what a row costs
ROWS_WITHOUT = 9.0  # by the prior, a step without rows takes as long as so many rows
PRIOR_WEIGHT = 4.0  # of the prior slope, in rows squared
MOST_TIMES = 3.0  # a step that takes longer than so many times what is expected is the machine's doing
DRAFTED_WEIGHT = 0.1  # of the newest step with drafts, in what such a row costs more
LEAST_SHARE = 0.1  # of what the prior says of a step: where the line falls below it, it is drawn too far


class RowCosts:
    """ns_per_row: what one more row costs; ns_per_drafted: what a row costs more if it has drafts, however many. Both
    are at least 0."""

    def __init__(self) -> None:
        self._weight = self._rows = self._ns = self._spread = self._product = 0.0  # means; sums of products about them
        self.ns_per_row = self.ns_per_drafted = 0.0

    def learn(self, num_rows: int, ns: float, num_drafted: int = 0) -> None:
        """Takes in a step. num_rows: drafts are counted too; num_drafted: rows with drafts."""
        if self._weight > 1.0:
            ns = min(ns, MOST_TIMES * self.expected_ns(num_rows))
        self._learn_line(num_rows, ns - num_drafted * self.ns_per_drafted)
        if num_drafted:
            beyond = (ns - self.expected_ns(num_rows)) / num_drafted
            self.ns_per_drafted = max(0.0, self.ns_per_drafted + DRAFTED_WEIGHT * (beyond - self.ns_per_drafted))

    def _learn_line(self, num_rows: int, ns: float) -> None:
        weight = MEMORY * self._weight + 1.0
        rows_off, ns_off = num_rows - self._rows, ns - self._ns
        self._rows += rows_off / weight
        self._ns += ns_off / weight
        kept = MEMORY * self._weight / weight
        memory = MEMORY if abs(rows_off) >= LEAST_OFF else 1.0  # a step like the others says nothing of the slope
        self._spread = memory * self._spread + kept * rows_off * rows_off
        self._product = memory * self._product + kept * rows_off * ns_off
        self._weight = weight
        prior = self._ns / (self._rows + ROWS_WITHOUT)
        self.ns_per_row = max(0.0, (self._product + PRIOR_WEIGHT * prior) / (self._spread + PRIOR_WEIGHT))

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    def expected_ns(self, num_rows: int) -> float:
        by_prior = self._ns * (num_rows + ROWS_WITHOUT) / (self._rows + ROWS_WITHOUT)
        return max(1.0, LEAST_SHARE * by_prior, self._ns + self.ns_per_row * (num_rows - self._rows))
