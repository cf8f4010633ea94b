"""A step that is on the device: what it will leave for the host, and what that means for its rows."""

from dataclasses import dataclass, field

from torch import Tensor

from splittime.core.plan import RowResult, StepPlan, StepResult, TokenLogprob
from splittime.kernels.triton.logprobs import Logprobs
from splittime.runner.batch import Batch
from splittime.runner.device.marks import Mark
from splittime.runner.host_store import Moved
from splittime.runner.torch_runner import NOT_FINITE


@dataclass
class Outcome:
    """What a step leaves, on the host, once `end` is reached.

    previous: the end of the step before. padded_rows: None for a step that was not captured. enqueue_ns: what the host
    took to launch it.
    silent, sampling: rows of the batch. is_silent_finite, is_finite: bool, one each; None for no such rows. tokens:
    int64, of `sampling`. described: of the lines of `sampling` in `described_lines`.
    """

    batch: Batch
    silent: list[int]
    sampling: list[int]
    previous: Mark | None
    begin: Mark
    forward: Mark
    end: Mark
    is_silent_finite: Tensor | None
    is_finite: Tensor | None
    tokens: Tensor | None
    padded_rows: int | None = None
    enqueue_ns: int = 0
    described_lines: list[int] = field(default_factory=list)
    described: Logprobs | None = None


@dataclass
class Launched:
    """results: of rows that failed before the launch. prompt_scores: by request. outcome: None if all rows did. moved:
    copies of blocks to host memory and back, before the rows."""

    plan: StepPlan
    results: dict[str, RowResult]
    outcome: Outcome | None = None
    moved: Moved | None = None
    prompt_scores: dict[str, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    broken: list[int] = field(default_factory=list)
    is_fetched: bool = False

    def fetch(self) -> None:
        """Wait for it, and let its requests know their tokens. Once; then it does nothing."""
        if self.is_fetched:
            return
        self.is_fetched = True
        if self.moved is not None:
            self.moved.end.wait()
        if self.outcome is not None:
            self.outcome.end.wait()
            self._take(self.outcome)

    def result(self) -> StepResult:
        """After `fetch`."""
        return self._computed() if self.moved is None else self.moved.told(self._computed())

    def _computed(self) -> StepResult:
        rows = tuple(self.results[row.request_id] for row in self.plan.rows)
        found = self.outcome
        if found is None:
            return StepResult(self.plan.step_id, rows, execution="eager")
        return StepResult(
            self.plan.step_id,
            rows,
            device_ns=found.forward.ns_since(found.begin if self.moved is None else self.moved.end),
            sample_ns=found.end.ns_since(found.forward),
            execution="eager" if found.padded_rows is None else "captured",
            padded_rows=found.padded_rows or 0,
            gap_ns=0 if found.previous is None else max(0, found.begin.ns_since(found.previous)),
            enqueue_ns=found.enqueue_ns,
        )

    def _take(self, found: Outcome) -> None:
        if found.is_silent_finite is not None:
            for index, is_fine in zip(found.silent, found.is_silent_finite.tolist(), strict=True):
                self._settle(index, is_fine, (), ())
        if found.tokens is not None and found.is_finite is not None:
            logprobs = _logprobs(found)
            lines = zip(found.sampling, found.tokens.tolist(), found.is_finite.tolist(), strict=True)
            for line, (index, token, is_fine) in enumerate(lines):
                if is_fine:
                    found.batch.slots[index].learn_sampled(found.batch.attention.context_lens[index], token)
                self._settle(index, is_fine, (token,), logprobs.get(line, ()))

    def _settle(self, index: int, is_fine: bool, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        request_id = self.plan_id(index)
        if is_fine:
            scores = self.prompt_scores.get(request_id, ())
            self.results[request_id] = RowResult(request_id, tokens, logprobs, scores)
        else:
            self.results[request_id] = RowResult(request_id, error=NOT_FINITE)
            self.broken.append(index)

    def plan_id(self, index: int) -> str:
        assert self.outcome is not None
        return self.outcome.batch.rows[index].request_id


def _logprobs(found: Outcome) -> dict[int, tuple[TokenLogprob, ...]]:
    """By line of `sampling`."""
    if found.described is None or found.tokens is None:
        return {}
    told, tokens = found.described, found.tokens.tolist()
    chosen, ranks = told.chosen.tolist(), told.ranks.tolist()
    ids, values = told.ids.tolist(), told.values.tolist()
    logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
    for place, line in enumerate(found.described_lines):
        count = found.batch.slots[found.sampling[line]].admitted.sampling.logprobs or 0
        top = tuple(zip(ids[place][:count], values[place][:count], strict=True))
        logprobs[line] = (TokenLogprob(tokens[line], chosen[place], ranks[place], top),)
    return logprobs
