"""A server whose draft model drafts under a clock of its own: steps of both models take what is declared, and the model
goes on with `RIGHT` or `WRONG` tokens, as the test says."""

from collections.abc import Callable
from math import log
from types import SimpleNamespace
from typing import Any

from splittime.core.row_costs import RowCosts
from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, Row, RowResult, StepPlan, StepResult, TokenLogprob
from splittime.runner.batch import Slots
from splittime.runner.draft_sources import LONGEST_PAUSE, ModelDrafter
from splittime.runner.draft_steps import num_spare_blocks
from splittime.runner.drafting import Look

MS = 1_000_000
BLOCK, NUM_BLOCKS, MAX_SEQS, MAX_TOKENS = 16, 512, 4, 4096
RIGHT, WRONG = 7, 8  # the draft model always guesses the first


class TimedModel:
    """The draft model, as far as a drafter knows it. draft_ms: of a step, whatever its rows; text_ms: of each token
    of a row that has more than two. read: tokens of each row of a text; sampled: rows of each step that drafts; given:
    tokens of each row that gives a draft.
    failing: requests whose rows fail, by the id that they have in the draft model."""

    def __init__(self, draft_ms: float, text_ms: float, most: int, probability: float, batch_tokens: int) -> None:
        self._draft_ns, self._text_ns, self._logprob = draft_ms * MS, text_ms * MS, log(probability)
        self.now_ns = 0
        blocks = NUM_BLOCKS + num_spare_blocks(most, BLOCK, MAX_SEQS)
        self.store = SimpleNamespace(block_size=BLOCK, num_blocks=blocks, layers=[])
        self.resolved = SimpleNamespace(
            block_size=BLOCK,
            num_blocks=NUM_BLOCKS,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=batch_tokens,
            max_model_len=MAX_TOKENS,
        )
        self.slots = Slots(MAX_TOKENS, 100)
        self.read: list[int] = []
        self.sampled: list[int] = []
        self.given: list[int] = []
        self.failing: set[str] = set()

    def slow_down_texts(self, times: float) -> None:
        self._text_ns *= times

    def run(self, plan: StepPlan) -> StepResult:
        num_text = sum(row.num_tokens for row in plan.rows if row.num_tokens > 2)
        self.now_ns += round(self._draft_ns + num_text * self._text_ns)
        self.read += [row.num_tokens for row in plan.rows if not row.num_samples]
        sampling = [row for row in plan.rows if row.num_samples]
        self.sampled += [len(sampling)] if sampling else []
        self.given += [row.num_tokens for row in sampling]
        return StepResult(0, tuple(self._result(row) for row in plan.rows))

    def _result(self, row: Row) -> RowResult:
        if row.request_id in self.failing:
            return RowResult(row.request_id, error="its logits are not finite")
        if not row.num_samples:
            return RowResult(row.request_id)
        return RowResult(row.request_id, (RIGHT,), (TokenLogprob(RIGHT, self._logprob, 1),))


class World:
    """fixed_ms, row_ms: of the model's step, without rows and for each. most: drafts a row. is_right: whether the
    model's token of a request is what is guessed, by the request and the number of the output. verified: the share of
    drafts that the scheduler has verified. is_head: what drafts reads the model's features."""

    def __init__(
        self,
        draft_ms: float = 1.0,
        text_ms: float = 0.01,
        most: int = 16,
        probability: float = 0.9,
        batch_tokens: int = 64,
        fixed_ms: float = 9.0,
        row_ms: float = 1.0,
        is_head: bool = False,
    ) -> None:
        self.model = TimedModel(draft_ms, text_ms, most, probability, batch_tokens)
        made: Any = self.model
        features: Any = SimpleNamespace() if is_head else None
        self.drafter = ModelDrafter(made, most, NUM_BLOCKS, MAX_TOKENS, lambda: self.model.now_ns, features)
        self.drafter.measure()
        self.model.read, self.model.sampled = [], []
        self._fixed_ms, self._row_ms = fixed_ms, row_ms
        self.is_right: Callable[[str, int], bool] = lambda name, number: True
        self.verified = 1.0
        self._free = list(range(NUM_BLOCKS))
        self._known: dict[str, int] = {}
        self._outputs: dict[str, int] = {}
        self._tables: dict[str, list[int]] = {}
        self._drafts: dict[str, tuple[int, ...]] = {}

    def admit(
        self,
        name: str,
        num_prompt: int = 3,
        salt: str = "",
        num_outputs: int = 0,
        most: int = 2000,
        stop_ids: tuple[int, ...] = (),
    ) -> None:
        sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=most)
        known = (1,) * num_prompt + (RIGHT,) * num_outputs
        self.drafter.admit(Admitted(name, known, num_outputs, sampling, stop_ids, salt))
        self._known[name], self._outputs[name], self._tables[name] = len(known), num_outputs, []

    def release(self, name: str, is_preempted: bool = False) -> None:
        self.drafter.release(name, is_preempted)
        self._free += self._tables.pop(name)
        self._drafts.pop(name, None)
        del self._known[name], self._outputs[name]

    def step(self) -> dict[str, int]:
        """Returns how many drafts each request has for the next step."""
        rows = tuple(self._row(name) for name in self._known)
        results = tuple(self._result(row) for row in rows)
        device_ns = round((self._fixed_ms + self._row_ms * sum(row.num_tokens for row in rows)) * MS)
        told = self.drafter.draft(StepPlan(0, rows), StepResult(0, results, device_ns), Look.NOWHERE) or {}
        self._drafts = {name: draft.token_ids for name, draft in told.items()}
        return {name: len(self._drafts.get(name, ())) for name in self._known}

    def steps(self, count: int, name: str = "a") -> list[int]:
        """Returns how many drafts a request has after each of so many steps."""
        return [self.step()[name] for _ in range(count)]

    def outputs(self, name: str) -> int:
        return self._outputs[name]

    def idle(self) -> None:
        """Steps without requests, until no pause is left of the requests before."""
        for _ in range(LONGEST_PAUSE):
            self.step()

    def price_drafts(self, draft_ms: float) -> None:
        """From now on a step of the draft model is known to take so long."""
        self.drafter.costs.draft = RowCosts()
        self.drafter.costs.draft.learn(1, draft_ms * MS)

    def _row(self, name: str) -> Row:
        known, num_outputs, table = self._known[name], self._outputs[name], self._tables[name]
        drafts = self._drafts.get(name, ())
        drafts = drafts[: round(self.verified * len(drafts))]
        start = known - 1 if num_outputs and table else 0
        new = [self._free.pop(0) for _ in range(-(-(known + len(drafts)) // BLOCK) - len(table))]
        table += new
        num_tokens = known - start
        return Row(name, start, (1,) * num_tokens, tuple(new), 1 + len(drafts), drafts)

    def _result(self, row: Row) -> RowResult:
        """All drafts that are right, and one token more."""
        name, came = row.request_id, []
        for place in range(1 + len(row.draft_token_ids)):
            came.append(RIGHT if self.is_right(name, self._outputs[name] + place) else WRONG)
            if came[-1] != RIGHT:
                break
        self._known[name] += len(came)
        self._outputs[name] += len(came)
        if row.draft_token_ids:
            table, num_blocks = self._tables[name], -(-(self._known[name] - 1) // BLOCK)
            self._free += table[num_blocks:]
            del table[num_blocks:]
        return RowResult(name, tuple(came))
