"""What guessing ahead took and what it saved in these books, by a line fitted to their own steps.

    length of a step without prompts = fixed + row * rows + draft * drafts + context * cached tokens read + draft_ns

No price is below 0. A step holds up everybody in it for its drafts and for the guessing, and each accepted draft spares
its own request a step:

    taken of a request by a step = draft * drafts of the step + draft_ns
    saved by it                  = accepted drafts of its row * (fixed + row * rows + context * cached tokens read)

With fewer drafts a row, the first of those that were accepted stay, and the others are guessed again in the steps that
follow, since the text before them is the same.

This is an estimate, and errs in favour of guessing: without it batches are taken to be as large as they were with it,
though requests that it slows down are in each other's way for longer; and guessing that the books do not time
(`draft_ns` is 0 inside another's engine) counts as a part of every step, guessed or not.

How sure the prices are the regression says (`simulate.regression`). Where steps do not tell what a draft costs from
what a row costs, as where each row always has as many, the interval is so wide that nothing is found.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy
from numpy.typing import NDArray

from splittime.diagnose.rules.share import CONFIDENCE, Share, of_requests, widened
from splittime.diagnose.rules.step_cost import MIN_STEPS_TO_FIT
from splittime.ledger.account import ClosedAccount
from splittime.ledger.steps import StepRecord
from splittime.stats.intervals import t_quantile

if TYPE_CHECKING:
    from splittime.simulate.regression import Line

FIXED, ROW, DRAFT, CONTEXT = range(4)  # prices, in the order of the line's coefficients
GUESSING = 4  # ns of guessing, behind them
MOST_STEPS = 50_000  # the latest: a line is as sure with them

Array = NDArray[numpy.float64]


class GuessedRows(NamedTuple):
    """The rows of the steps that guessed or verified, as arrays. request_ids: of the requests that they belong to.

    step, request [rows]: indices. drafts, accepted [rows]: of each row; 0 of one without drafts.
    work [steps, 4]: of each step, what the prices multiply. guess_ns [steps]: what guessing took.
    """

    request_ids: tuple[str, ...]
    step: NDArray[numpy.int64]
    request: NDArray[numpy.int64]
    drafts: Array
    accepted: Array
    work: Array
    guess_ns: Array

    def gained(self, most: int) -> Array:
        """Returns [requests, 5]: how much less of each price every request would have paid with at most so many drafts
        a row, and how many ns less of guessing; 0 drafts are no guessing."""
        kept = numpy.bincount(self.step, numpy.minimum(self.drafts, most), len(self.work))
        guess_ns = self.guess_ns * (most > 0)
        spared = numpy.zeros((len(self.work), 5))
        spared[:, DRAFT], spared[:, GUESSING] = self.work[:, DRAFT] - kept, self.guess_ns - guess_ns
        another_step = numpy.column_stack([self.work, guess_ns])
        another_step[:, DRAFT] = kept
        num_more = numpy.ceil((1 + self.accepted) / (1 + most)) - 1
        by_row = spared[self.step] - num_more[:, None] * another_step[self.step]
        columns = [numpy.bincount(self.request, column, len(self.request_ids)) for column in by_row.T]
        return numpy.stack(columns, axis=1)


def guessed_rows(steps: Sequence[StepRecord], accounts: Sequence[ClosedAccount]) -> GuessedRows | None:
    """Returns the rows of these requests; None if nobody guessed."""
    guessing = [step for step in steps if step.verified or step.draft_ns]
    number = {account.request_id: index for index, account in enumerate(accounts)}
    rows = [row for index, step in enumerate(guessing) for row in _rows_of(step, index, number)]
    if not rows:
        return None
    step, request, drafts, accepted = numpy.array(rows, dtype=float).T
    work = numpy.array([work_of(each) for each in guessing], dtype=float)
    guess_ns = numpy.array([each.draft_ns for each in guessing], dtype=float)
    return GuessedRows(tuple(number), step.astype(int), request.astype(int), drafts, accepted, work, guess_ns)


def _rows_of(step: StepRecord, index: int, number: Mapping[str, int]) -> Iterator[tuple[int, int, int, int]]:
    """Yields (step, request, drafts, accepted drafts) of its rows, those of unknown requests left out."""
    verified = {request_id: (drafts, accepted) for request_id, drafts, accepted in step.verified}
    for request_id, _, _ in step.rows:
        if request_id in number:
            yield index, number[request_id], *verified.get(request_id, (0, 0))


def work_of(step: StepRecord) -> tuple[float, float, float, float]:
    """Returns what the prices multiply: 1, decode rows, drafts, and the cached tokens that decode rows read."""
    drafts = {request_id: count for request_id, count, _ in step.verified}
    num_drafts = sum(drafts.values())
    context = sum(start + 1 for request_id, start, count in step.rows if count == 1 + drafts.get(request_id, 0))
    return 1.0, float(step.decode_tokens - num_drafts), float(num_drafts), float(context)


def prices_of(steps: Sequence[StepRecord]) -> "Line | None":
    """Returns the prices in ns, of a step, a row, a draft and a cached token read, and how sure they are; None where
    fewer than `MIN_STEPS_TO_FIT` steps have no prompt."""
    from splittime.simulate.regression import line_of  # scipy: half a second

    plain = [step for step in steps if step.decode_tokens and not step.prefill_tokens][-MOST_STEPS:]
    if len(plain) < MIN_STEPS_TO_FIT:
        return None
    columns = numpy.array([work_of(step) for step in plain], dtype=float)
    return line_of(columns, numpy.array([step.length_ns - step.draft_ns for step in plain], dtype=float))


def gain(rows: GuessedRows, prices: "Line", accounts: Sequence[ClosedAccount], most: int = 0) -> Share:
    """Returns the share of the requests' time that at most so many drafts a row would save; its interval is of these
    requests and of the prices together."""
    gained = rows.gained(most)
    by_request = dict(zip(rows.request_ids, gained_ns(gained, prices).tolist(), strict=True))
    felt_ns = sum(account.end_ns - account.start_ns for account in accounts)
    all_of_them = gained.sum(axis=0)[:GUESSING]
    error_ns = sqrt(max(0.0, float(all_of_them @ prices.covariance @ all_of_them)))
    return widened(of_requests(by_request, accounts), reach(error_ns) / max(1, felt_ns))


def gained_ns(gained: Array, prices: "Line") -> Array:
    """Returns [requests]: ns."""
    found: Array = gained[:, :GUESSING] @ prices.coefficients + gained[:, GUESSING]
    return found


def reach(error: float) -> float:
    """Returns how far what was estimated with this standard error may be off, either way."""
    from splittime.simulate.regression import NUM_CLUSTERS

    return t_quantile((1 + CONFIDENCE) / 2, NUM_CLUSTERS - 1) * error
