"""Is one more draft worth its time? By what steps of both models took, and how often drafts were right.

A step of the model gives each of its requests a token. A draft that is right with a chance p adds p tokens, and costs a
row of the draft model's step and a row of the model's. So drafts are made one of each request at a time, while the step
that will verify them is expected to give more tokens for its time with one more than without; the first ones must make
it better by `MARGIN`.

When a request comes, the draft model has computed none of its text. To compute it is worth it if what is left of the
answer is expected to save more time than that takes. How long answers are, and how often drafts are right, is learnt by
tenant (`draft_record`); an answer that is longer than most is expected to go on for as long as it has.
"""

from splittime.core.row_costs import RowCosts
from splittime.core.step import StepPlan, StepResult

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
