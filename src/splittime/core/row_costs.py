"""How long a decode step takes, by its rows and by the drafts that it verifies, learnt from the latest steps.

Without drafts it is a line over the rows. What drafts take beyond it is learnt apart, since a request's row is more
than a draft's: it is sampled, told and settled; and a row that has drafts is widened and settled differently, however
many they are. Both columns decide by it about drafts: the scheduler, how many of them the next step verifies; a draft
model, how many are worth making.

The line is fitted to steps without drafts alone: a step with drafts that took long does not say which of the two was
dearer than believed. So whoever drafts in every step leaves one out now and then.

Where steps say nothing, a prior does. For the line: steps with as many rows as the mean change its height alone, and
before steps have differed the prior says how steep it is. For drafts: one of them takes what a row does, by the line or
by the prior, whichever is less, and a row's having some takes nothing (ridge regression towards these two). Steps
without drafts let both return to that, or one slow minute of the machine would end drafts for good.
"""

MEMORY = 0.97  # what is left of a step when another follows
LEAST_OFF = 0.5  # rows by which a step must differ from the mean to tell what a row costs
ROWS_WITHOUT = 9.0
PRIOR_WEIGHT = 4.0  # of the prior slope, in rows squared
MOST_TIMES = 3.0  # a step that takes longer than so many times what is expected is the machine's doing
LEAST_SHARE = 0.1  # of what the prior says of a step: where the line falls below it, it is drawn too far
DRAFTS_MEMORY = 0.9995  # what is left of a step with drafts when one without follows
DRAFTS_PRIOR = 32.0  # weight of the prior, in drafts squared
DRAFTED_PRIOR = 8.0  # weight of a row's having drafts taking nothing, in such rows squared


class RowCosts:
    """rows_without: by the prior, a step without rows takes as long as so many.

    ns_per_row: what one more row costs; ns_per_draft: what one more draft; ns_per_drafted: what a row costs more if
    it has drafts. All are at least 0."""

    def __init__(self, rows_without: float = ROWS_WITHOUT) -> None:
        self._rows_without = rows_without
        self._weight = self._rows = self._ns = self._spread = self._product = 0.0  # means; sums of products about them
        self.ns_per_row = self._prior_ns = 0.0  # what one more row costs, by the line and by the prior
        self._drafts = DraftCosts()

    @property
    def ns_per_draft(self) -> float:
        return self._drafts.ns_per_draft

    @property
    def ns_per_drafted(self) -> float:
        return self._drafts.ns_per_drafted

    def learn(self, num_rows: int, ns: float, num_drafts: int = 0, num_drafted: int = 0) -> None:
        """Takes in a step. num_rows: without the drafts; num_drafted: rows with drafts."""
        if self._weight > 1.0:
            ns = min(ns, MOST_TIMES * self.expected_ns(num_rows, num_drafts, num_drafted))
        if not num_drafts:
            self._learn_line(num_rows, ns)
        elif not self.is_known:  # the first step of all: by the prior, a draft takes what a row does
            without = num_rows + self._rows_without
            self._learn_line(num_rows, ns * without / (without + num_drafts))
        beyond = ns - self.expected_ns(num_rows) if num_drafts else 0.0
        self._drafts.learn(num_drafts, num_drafted, beyond, min(self._prior_ns, self.ns_per_row))

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
        self._prior_ns = self._ns / (self._rows + self._rows_without)
        self.ns_per_row = max(0.0, (self._product + PRIOR_WEIGHT * self._prior_ns) / (self._spread + PRIOR_WEIGHT))

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    def expected_ns(self, num_rows: int, num_drafts: int = 0, num_drafted: int = 0) -> float:
        by_prior = self._ns * (num_rows + self._rows_without) / (self._rows + self._rows_without)
        plain = max(1.0, LEAST_SHARE * by_prior, self._ns + self.ns_per_row * (num_rows - self._rows))
        return plain + self._drafts.ns(num_drafts, num_drafted) if num_drafts else plain


class DraftCosts:
    """What drafts take beyond a step without: so much a draft, and so much a row that has some."""

    def __init__(self) -> None:
        self.ns_per_draft = self.ns_per_drafted = 0.0
        self._drafts2 = self._both = self._drafted2 = self._drafts_ns = self._drafted_ns = 0.0  # sums of products

    def ns(self, num_drafts: int, num_drafted: int) -> float:
        return num_drafts * self.ns_per_draft + num_drafted * self.ns_per_drafted

    def learn(self, num_drafts: int, num_drafted: int, ns: float, prior_ns: float) -> None:
        """Takes in a step. ns: what it took longer than one without drafts; prior_ns: of a draft."""
        memory = MEMORY if num_drafts else DRAFTS_MEMORY
        self._drafts2 = memory * self._drafts2 + num_drafts * num_drafts
        self._both = memory * self._both + num_drafts * num_drafted
        self._drafted2 = memory * self._drafted2 + num_drafted * num_drafted
        self._drafts_ns = memory * self._drafts_ns + num_drafts * ns
        self._drafted_ns = memory * self._drafted_ns + num_drafted * ns
        self._solve(prior_ns)

    def _solve(self, prior_ns: float) -> None:
        """Sets both to the least squares, or to the best with one of them 0."""
        drafts2, drafted2, both = self._drafts2 + DRAFTS_PRIOR, self._drafted2 + DRAFTED_PRIOR, self._both
        drafts_ns, drafted_ns = self._drafts_ns + DRAFTS_PRIOR * prior_ns, self._drafted_ns
        size = drafts2 * drafted2 - both * both
        a_draft = (drafts_ns * drafted2 - drafted_ns * both) / size
        a_row = (drafted_ns * drafts2 - drafts_ns * both) / size
        if a_row < 0.0:
            a_draft, a_row = drafts_ns / drafts2, 0.0
        elif a_draft < 0.0:
            a_draft, a_row = 0.0, drafted_ns / drafted2
        self.ns_per_draft, self.ns_per_drafted = max(0.0, a_draft), max(0.0, a_row)
